"""The task's constructor is the schema of `task.*` and `model.*`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest

import elastictrain
from elastictrain.config.constraints import Range
from elastictrain.config.task_signature import check_call, find_task, plain_arguments, task_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    width: Annotated[int, Range(1)]
    """Width of the layer."""
    depth: int = 2
    """Number of layers."""


class Base:
    def build_model(self) -> object: ...

    def loss(self, model: object, batch: object) -> object: ...


class WithModel(Base):
    def __init__(self, *, model: Shape, rate: float = 0.1, names: tuple[str, ...] = (), label: str | None = None) -> None:
        self.model = model
        self.rate = rate
        self.names = names


class WithDatasets(Base):
    def __init__(self, *, folder: str) -> None:
        self.folder = folder

    def train_dataset(self) -> object: ...

    def eval_dataset(self) -> object: ...


class WithHalf(Base):
    def train_dataset(self) -> object: ...


class Bare(Base):
    pass


class Inherits(WithModel):
    pass


class Open(Base):
    def __init__(self, **anything: object) -> None:
        self.anything = anything


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("my_tasks")
    for cls in (WithModel, WithDatasets, WithHalf, Bare, Inherits, Open, Shape):
        if cls is not Shape:
            monkeypatch.setattr(cls, "__module__", "my_tasks")
        setattr(made, cls.__name__, cls)
    made.helper = lambda: None
    monkeypatch.setitem(sys.modules, "my_tasks", made)


def problems_of(cls: type, options: dict[str, object], model: dict[str, object]) -> list[str]:
    """The keys that are wrong."""
    arguments, problems = check_call(cls, options=options, model=model)
    assert (arguments is None) == bool(problems)
    return [problem.key for problem in problems]


def test_half_of_an_ability_is_refused() -> None:
    assert find_task("my_tasks.WithDatasets")[0] is WithDatasets
    found, problems = find_task("my_tasks.WithHalf")
    assert found is None
    assert problems[0].message.endswith("my_tasks.WithHalf lacks eval_dataset")


def test_a_good_call_is_complete_and_plain() -> None:
    arguments, problems = check_call(WithModel, options={"rate": 1, "names": ["a"]}, model={"width": 1e1})
    assert problems == []
    assert arguments == {"model": Shape(width=10), "rate": 1.0, "names": ("a",)}
    plain = {"rate": 1.0, "names": ["a"], "label": None}, {"width": 10, "depth": 2}
    assert plain_arguments(WithModel, arguments) == plain


def test_all_problems_of_task_and_model_at_once() -> None:
    found = problems_of(WithModel, {"rate": "x", "raet": 1, "model": {}}, {"width": 0, "detph": 1})
    assert found == ["task.model", "task.raet", "task.rate", "model.detph", "model.width"]


def test_an_inherited_constructor_counts() -> None:
    assert problems_of(Inherits, {}, {"width": "x"}) == ["model.width"]


def test_a_mandatory_option_and_a_model_nobody_takes() -> None:
    assert problems_of(WithDatasets, {}, {"width": 1}) == ["task.folder", "model.width"]
    assert check_call(WithDatasets, options={"folder": "x"}, model={}) == ({"folder": "x"}, [])


def test_a_model_without_keys_lacks_those_that_must_be_given() -> None:
    assert problems_of(WithModel, {}, {}) == ["model.width"]


def test_a_class_without_a_constructor_takes_nothing() -> None:
    assert problems_of(Bare, {}, {}) == []
    assert problems_of(Bare, {"a": 1}, {}) != []


def test_open_keywords_take_anything() -> None:
    assert problems_of(Open, {"a": 1, "b": {"c": 2}}, {}) == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Task", "must be package.module.Class, but is 'Task'"),
        ("no_such_package.Task", "there is no module no_such_package;"),
        ("my_tasks.WithModle", "has no WithModle; did you mean WithModel?"),
        ("my_tasks.helper", "my_tasks.helper is a function"),
        ("my_tasks.Shape", "my_tasks.Shape lacks build_model, loss"),
    ],
)
def test_a_target_that_is_no_task(target: str, message: str) -> None:
    cls, problems = find_task(target)
    assert cls is None
    assert message in str(problems[0])
    assert problems[0].key == "task._target_"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("fails_to_divide", "1 / 0", "ZeroDivisionError: division by zero"),
        ("fails_to_import", "import no_such_package", "'no_such_package'"),
        ("fails_to_parse", "def", "SyntaxError"),
    ],
)
def test_a_module_that_fails_says_what_failed_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, message: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    _, problems = find_task(f"{name}.Task")
    assert message in str(problems[0])
    assert str(problems[0]).count(f"{name}.py") == 1
    assert "importlib" not in str(problems[0])


def test_keys_of_a_task_for_help() -> None:
    keys = {key.path: key for key in task_keys("my_tasks.WithModel")}
    assert list(keys) == ["model.width", "model.depth", "task.rate", "task.names", "task.label"]
    assert [keys[name].doc.split()[0] for name in ("model.width", "model.depth")] == ["Width", "Number"]
    assert (keys["model.width"].default, keys["task.rate"].default) == (None, "0.1")
    assert task_keys("no_such_package.Task") == []


def test_recipes_are_found_within_the_package_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wheel has them; the one beside the package, as in a checkout, comes first."""
    (tmp_path / "recipes" / "packed").mkdir(parents=True)
    (tmp_path / "recipes" / "__init__.py").touch()
    (tmp_path / "recipes" / "packed" / "__init__.py").write_text(
        "class Task:\n    def build_model(self): ...\n    def loss(self, model, batch): ...\n"
    )
    monkeypatch.setattr(elastictrain, "__path__", [*elastictrain.__path__, str(tmp_path)])
    try:
        cls, problems = find_task("recipes.packed.Task")
        assert (cls is not None and cls.__module__, problems) == ("elastictrain.recipes.packed", [])
        cls, _ = find_task("recipes.digits.DigitsTask")
        assert cls is not None
        assert cls.__module__ == "recipes.digits.task"
        assert [problem.key for problem in find_task("recipes.nosuch.Task")[1]] == ["task._target_"]
    finally:
        for name in [name for name in sys.modules if name.startswith("elastictrain.recipes")]:
            del sys.modules[name]
