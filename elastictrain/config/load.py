"""From arguments to a frozen RunConfig; all problems are reported at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from elastictrain.config.compose import Composed, compose
from elastictrain.config.composed import RunConfig, TaskGroup
from elastictrain.config.constraints import show
from elastictrain.config.rules import check_rules
from elastictrain.config.schema import DATACLASSES, GROUPS, all_keys
from elastictrain.config.targets import check_targets
from elastictrain.config.task_signature import TARGET, check_call, find_task, plain_arguments
from elastictrain.config.validate import NOT_GIVEN, check_dataclass, unknown_key
from elastictrain.errors import ConfigError, Problem


def load(arguments: Sequence[str], *, with_task: bool = True, composed: Composed | None = None) -> RunConfig:
    """The configuration of a command line. Raises: UsageError; ConfigError with every problem. Without `with_task` nothing
    imports the task's module, or torch: `task.*` and `model.*` stay as written. `composed`: what `compose` has returned for
    these arguments before, which takes most of the time."""
    composed = composed or compose(arguments)
    config, found = check_tree(composed.tree, with_task=with_task)
    problems = [*composed.problems, *_worth_telling(found, composed)]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _worth_telling(found: Sequence[Problem], composed: Composed) -> list[Problem]:
    """Problems of values that do not follow from a problem of the composition."""
    broken = {problem.key for problem in composed.problems}
    found = [problem for problem in found if problem.key not in broken]
    given = [problem for problem in found if _is_given(composed.tree, problem.key)]
    if composed.partial:
        return given
    if len(given) < len(found) and composed.recipe is None:
        names = ", ".join(composed.recipes)
        return [Problem("recipe", f"is not chosen: choose one of {names}, or give every key below yourself"), *found]
    return found


def _is_given(tree: Mapping[str, object], key: str) -> bool:
    node: object = tree
    for name in key.split("."):
        node = node.get(name, NOT_GIVEN) if isinstance(node, Mapping) else NOT_GIVEN
    return node != NOT_GIVEN


def check_tree(tree: Mapping[str, object], *, with_task: bool) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration in a mapping of the shape of conf/ (a composition, or a stored config.yaml), and its problems."""
    given, problems = _split_groups(tree)
    groups: dict[str, Any] = {}
    for name, cls in DATACLASSES.items():
        if name in given:
            group, found = check_dataclass(cls, values=given[name], path=name, vocabulary=all_keys())
            problems += found
            groups |= {name: group} if group is not None else {}
    task = None
    if "task" in given:
        options = given["task"]
        target = options.pop("_target_", NOT_GIVEN)
        if target == NOT_GIVEN:
            problems.append(Problem(TARGET, "must be given: the dotted path of a task's class, e.g. recipes.llama.LlamaTask"))
        elif isinstance(target, str):
            task = TaskGroup(target, options)
        else:
            problems.append(Problem(TARGET, f"must be the dotted path of a class, but is {show(target)}"))
    model: Mapping[str, object] = given.get("model", {})
    uses_token_files = False
    if task and with_task:
        task_class, found = find_task(task.target)
        if task_class:
            uses_token_files = not callable(getattr(task_class, "train_dataset", None))
            arguments, found = check_call(task_class, options=task.options, model=model, vocabulary=all_keys())
            if arguments is not None:
                options, model = plain_arguments(task_class, arguments)
                task = TaskGroup(task.target, options)
        problems += found
    if with_task and groups.keys() >= {"optim", "train"}:
        problems += check_targets(groups["optim"], total_steps=groups["train"].steps)
    problems += check_rules(groups, uses_token_files=uses_token_files)
    return (None if problems or task is None else RunConfig(**groups, task=task, model=model)), problems


def _split_groups(tree: Mapping[str, object]) -> tuple[dict[str, dict[str, object]], list[Problem]]:
    """The keys of each group, none for one that is left out; a value that is no group becomes a problem."""
    given: dict[str, dict[str, object]] = {}
    problems = []
    for name in GROUPS:
        values = tree.get(name)
        if values is None or isinstance(values, Mapping):
            given[name] = {str(key): value for key, value in (values or {}).items()}
        else:
            problems.append(Problem(name, f"must be a group of keys, but is {show(values)}"))
    for name, values in tree.items():
        if name not in GROUPS:
            keys = [f"{name}.{key}" for key in values] if isinstance(values, Mapping) and values else [name]
            problems += [unknown_key(key, vocabulary=(*all_keys(), *GROUPS, "recipe")) for key in keys]
    return given, problems
