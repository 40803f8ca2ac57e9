"""Finds the task's class and checks the keys `task.*` and `model.*` against the parameters of its constructor."""

import importlib
import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from elastictrain.config.composed import RunConfig
from elastictrain.config.constraints import plain
from elastictrain.config.schema import Key, keys_of
from elastictrain.config.user_code import calling
from elastictrain.config.validate import check_keys, check_value, construct, parameters_of, suggest_choice
from elastictrain.errors import ConfigError, Problem

TARGET = "task._target_"
METHODS = ("build_model", "loss")
# pairs of methods that make one ability: a task with only one of them would silently count as one without
TOGETHER = (("train_dataset", "eval_dataset"), ("init_parameter", "init_buffer"), ("flops_per_sample", "tokens_per_sample"))


def plain_arguments(cls: type, arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Plain values of `task.*` and of `model.*`, with the plain defaults of `cls` filled in."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if isinstance(parameter.default, bool | int | float | str | tuple | None) or is_dataclass(parameter.default)
    }
    values = {name: plain(value) for name, value in {**defaults, **arguments}.items()}
    model = values.pop("model", None)
    return values, dict(model) if isinstance(model, Mapping) else {}


def find_task(target: str) -> tuple[type | None, list[Problem]]:
    """Import the class at a dotted path, with all side effects of its module's import."""
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        return None, [Problem(TARGET, f"must be package.module.Class, but is {target!r}")]
    try:
        module = _import(module_name)
    except Exception as error:  # noqa: BLE001  a module of the user's own may raise anything when imported
        return None, [Problem(TARGET, _import_failure(module_name, error))]
    found = getattr(module, class_name, None)
    if found is None:
        classes = [name for name, one in vars(module).items() if isinstance(one, type) and one.__module__ == module_name]
        message = f"must name a class, but {module_name} has no {class_name}{suggest_choice(class_name, choices=classes)}"
        return None, [Problem(TARGET, message)]
    if not isinstance(found, type):
        return None, [Problem(TARGET, f"must name a class, but {target} is a {type(found).__name__}")]
    message = ""
    if lacking := [name for name in METHODS if not callable(getattr(found, name, None))]:
        message = f"must name a class with the methods build_model and loss; {target} lacks {', '.join(lacking)}"
    for pair in TOGETHER:
        missing = [name for name in pair if not callable(getattr(found, name, None))]
        if len(missing) == 1:
            message = f"must name a class that has both or neither of {' and '.join(pair)}; {target} lacks {missing[0]}"
    return (None, [Problem(TARGET, message)]) if message else (found, [])


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A checkout has `recipes` beside `elastictrain`, a wheel within it; a run may go on from the one under the other.
        found = name.startswith("recipes.") and find_spec("elastictrain.recipes") is not None
        if not found or not f"{name}.".startswith(f"{error.name}."):
            raise
        return importlib.import_module(f"elastictrain.{name}")


def _import_failure(module_name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return (
            f"must be in a module that can be imported, but there is no module {error.name}; "
            "install it, or start in the folder that holds it"
        )
    # The frame where the module's own code failed; frames of the import system help no one.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 and frames[-1].filename != __file__ else ""
    return f"names a class in {module_name}, which cannot be imported: {type(error).__name__}: {error}{where}"


def check_call(
    cls: type, *, options: Mapping[str, object], model: Mapping[str, object], vocabulary: Sequence[str] = ()
) -> tuple[dict[str, object] | None, list[Problem]]:
    """The arguments for the task's class from the keys `task.*` and `model.*`, and all problems with them."""
    problems: list[Problem] = []
    target = f"{cls.__module__}.{cls.__qualname__}"
    try:
        declared = parameters_of(cls)
    except NameError as error:
        return None, [Problem(TARGET, f"names {target}, whose constructor has an annotation that cannot be read: {error}")]
    hint, parameter = declared.pop("model", (None, None))
    if "model" in options:
        problems.append(Problem("task.model", "is not a key: the model's keys are the group `model`"))
    given = {name: value for name, value in options.items() if name != "model"}
    for one in inspect.signature(cls).parameters.values():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            declared = {**dict.fromkeys(given, (object, one)), **declared}
    arguments, found = check_keys(declared, values=given, path="task", vocabulary=vocabulary)
    problems += found
    if parameter is None:
        problems += [Problem(f"model.{key}", f"is not a key: {target} takes no model") for key in model]
    elif model or parameter.default is inspect.Parameter.empty:
        arguments["model"], found = check_value(model, hint=hint, path="model")
        problems += found
    return (None, problems) if problems else (arguments, [])


def task_keys(target: str) -> list[Key]:
    """The keys `task.*` and `model.*` that a task declares; none if it cannot be imported."""
    cls, _ = find_task(target)
    keys = keys_of(cls, path="task") if cls is not None else []
    return [replace(key, path=key.path.removeprefix("task.")) if key.path.startswith("task.model.") else key for key in keys]


def make_task(cls: type, *, options: Mapping[str, object], model: Mapping[str, object]) -> object:
    """The task with these values of `task.*` and `model.*`. Raises: ConfigError with all their problems."""
    arguments, problems = check_call(cls, options=options, model=model)
    task = None
    if arguments is not None:
        task, problems = construct(cast("type[object]", cls), arguments=arguments, path="task")
    if problems:
        raise ConfigError(problems)
    return task


def build_task(config: RunConfig) -> object:
    """Raises: ConfigError."""
    cls, problems = find_task(config.task.target)
    if cls is None:
        raise ConfigError(problems)
    with calling(cls, "__init__"):
        return make_task(cls, options=config.task.options, model=config.model)
