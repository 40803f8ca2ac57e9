"""The keys, their docstrings, and conf/ agree."""

from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from elastictrain.config.compose import own_conf
from elastictrain.config.composed import CheckpointGroup, RunConfig
from elastictrain.config.help import first_comment
from elastictrain.config.schema import DATACLASSES, GROUPS, all_keys, keys_of
from elastictrain.config.validate import NOT_GIVEN, check_dataclass

FILES = sorted(file for group in DATACLASSES for file in (own_conf() / group).glob("*.yaml"))


def test_groups_are_the_fields_of_run_config() -> None:
    assert set(GROUPS) == {field.name for field in fields(RunConfig)}


@pytest.mark.parametrize("group", DATACLASSES)
def test_every_key_has_a_docstring(group: str) -> None:
    lacking = [key.path for key in keys_of(DATACLASSES[group], path=group) if not key.doc]
    assert lacking == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_choice_holds_good_keys_only_and_says_what_it_is(file: Path) -> None:
    group = file.parent.name
    values = OmegaConf.to_container(OmegaConf.load(file))
    # What a choice builds on is a choice of its own.
    values.pop("defaults", None)
    _, problems = check_dataclass(DATACLASSES[group], values=values, path=group)
    wrong = {problem.key.split(".")[1] for problem in problems}
    # What must be given is for a recipe to say.
    assert {name for name in wrong if values.get(name, NOT_GIVEN) != NOT_GIVEN} == set()
    assert first_comment(file)


def _default(field: Field[object]) -> object:
    if field.default_factory is MISSING:
        # YAML has lists only.
        return list(field.default) if isinstance(field.default, tuple) else field.default
    made = field.default_factory()
    return asdict(made) if is_dataclass(made) else made  # type: ignore[call-overload]


@pytest.mark.parametrize("group", DATACLASSES)
def test_the_default_choice_lists_every_key_with_the_default_of_its_dataclass(group: str) -> None:
    name = {"data": "stdlib", "optim": "adamw", "parallel": "hsdp"}.get(group, "default")
    values = OmegaConf.to_container(OmegaConf.load(own_conf() / group / f"{name}.yaml"))
    declared = {field.name: _default(field) for field in fields(DATACLASSES[group])}
    for key, value in values.items():
        assert value == declared[key] or value == "???" or (group, key) == ("parallel", "kind"), key
    assert set(values) == set(declared) - ({"bucket_mb"} if group == "parallel" else set())


def test_config_yaml_is_a_defaults_list_with_every_group() -> None:
    config = OmegaConf.to_container(OmegaConf.load(own_conf() / "config.yaml"))
    assert list(config) == ["defaults"]
    folders = {folder.name for folder in own_conf().iterdir() if folder.is_dir()}
    assert {name for default in config["defaults"] for name in default} == folders == {*GROUPS, "recipe"}


def test_all_keys_are_dotted_names() -> None:
    assert {"run.dir", "train.micro_batch", "fault.step_timeout_s", "task._target_"} <= set(all_keys())


@dataclass
class Made:
    sizes: list[int] = field(default_factory=lambda: [1, 2], metadata={"doc": "Sizes."})


def test_a_default_that_is_made_is_shown() -> None:
    (key,) = keys_of(Made, path="model")
    assert (key.path, key.default, key.doc) == ("model.sizes", "[1, 2]", "Sizes.")


@pytest.mark.parametrize(
    ("value", "kept"),
    [("auto", "auto"), (0, 0), (7, 7), (1e1, 10), (-1, None), (2.5, None), (True, None), ("often", None), (None, None)],
)
def test_the_interval_of_snapshots_is_learned_or_a_whole_number(value: object, kept: object) -> None:
    group, problems = check_dataclass(CheckpointGroup, values={"snapshot_every_steps": value}, path="checkpoint")
    if kept is None:
        (problem,) = problems
        assert problem.key == "checkpoint.snapshot_every_steps"
        assert all(token in problem.message for token in (">= 0", "auto"))
    else:
        assert group is not None
        assert group.snapshot_every_steps == kept
