"""From arguments to a frozen RunConfig; everything that is wrong is reported at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elastictrain.config.checkpoint import CheckpointGroup
from elastictrain.config.combinations import check_combinations, check_launch
from elastictrain.config.compose import Composed, compose
from elastictrain.config.composed import RunConfig
from elastictrain.config.data import DataGroup
from elastictrain.config.describe import show
from elastictrain.config.fault import FaultGroup
from elastictrain.config.ladder import check_ladder
from elastictrain.config.launch import LaunchGroup
from elastictrain.config.optim import OptimGroup
from elastictrain.config.parallel import ParallelGroup
from elastictrain.config.preflight import PreflightGroup
from elastictrain.config.run import RunGroup
from elastictrain.config.schema import GROUPS, all_keys
from elastictrain.config.task import TaskGroup
from elastictrain.config.task_signature import TARGET, TaskCall, brings_datasets, check_call, find_task
from elastictrain.config.telemetry import TelemetryGroup
from elastictrain.config.train import TrainGroup
from elastictrain.config.validate import NOT_GIVEN, check_dataclass, unknown_key
from elastictrain.errors import ConfigError, Problem

T = TypeVar("T")


def load(arguments: Sequence[str], *, with_task: bool = True) -> RunConfig:
    """The configuration that a command line asks for.

    `with_task` imports the task's module and checks `task.*` and `model.*` as well; without it nothing imports torch, and those
    two stay as they were written.

    Raises: UsageError for a wrong option; ConfigError with every problem there is.
    """
    return check_composed(compose(arguments), with_task=with_task)


def check_composed(composed: Composed, *, with_task: bool) -> RunConfig:
    """Raises: ConfigError with the problems of the composition and those of the values."""
    config, found = check_tree(composed.tree, with_task=with_task)
    broken = {problem.key for problem in composed.problems}
    found = [problem for problem in found if problem.key not in broken]
    missing = [problem for problem in found if not _is_given(composed.tree, problem.key)]
    if composed.partial:
        found = [problem for problem in found if problem not in missing]
    elif missing and composed.recipe is None:
        names = ", ".join(composed.recipes)
        found.insert(0, Problem("recipe", f"is not chosen: choose one of {names}, or give every key below yourself"))
    problems = [*composed.problems, *found]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _is_given(tree: Mapping[str, object], key: str) -> bool:
    node: object = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return node != NOT_GIVEN


def check_tree(tree: Mapping[str, object], *, with_task: bool) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration in a plain mapping of the shape of conf/ (a composition, or a stored config.yaml), and its problems."""
    problems = _unknown_groups(tree)

    def group(cls: type[T], name: str) -> T | None:
        values = _keys_of(tree, name, problems)
        result, found = (None, []) if values is None else check_dataclass(cls, values=values, path=name, vocabulary=all_keys())
        problems.extend(found)
        return result

    run = group(RunGroup, "run")
    task = _task_group(_keys_of(tree, "task", problems), problems)
    model = _keys_of(tree, "model", problems) or {}
    data = group(DataGroup, "data")
    train = group(TrainGroup, "train")
    optim = group(OptimGroup, "optim")
    parallel = group(ParallelGroup, "parallel")
    checkpoint = group(CheckpointGroup, "checkpoint")
    fault = group(FaultGroup, "fault")
    preflight = group(PreflightGroup, "preflight")
    telemetry = group(TelemetryGroup, "telemetry")
    launch = group(LaunchGroup, "launch")
    call: TaskCall | None = None
    uses_token_files = False
    if task and with_task:
        cls, found = find_task(task.target)
        if cls:
            call, found = check_call(cls, options=task.options, model=model, vocabulary=all_keys())
            uses_token_files = not brings_datasets(cls)
        problems += found
    problems += check_combinations(train=train, data=data, parallel=parallel, uses_token_files=uses_token_files)
    problems += check_ladder(fault, preflight=preflight) if fault and preflight else []
    problems += check_launch(launch) if launch else []
    if problems or not (
        run and task and data and train and optim and parallel and checkpoint and fault and preflight and telemetry and launch
    ):
        return None, problems
    if call:
        task, model = replace(task, options=call.options()), call.model()
    return RunConfig(run, task, model, data, train, optim, parallel, checkpoint, fault, preflight, telemetry, launch), problems


def _unknown_groups(tree: Mapping[str, object]) -> list[Problem]:
    problems = []
    for name, values in tree.items():
        if name not in GROUPS:
            keys = [f"{name}.{key}" for key in values] if isinstance(values, Mapping) and values else [name]
            problems += [unknown_key(key, vocabulary=(*all_keys(), *GROUPS, "recipe")) for key in keys]
    return problems


def _keys_of(tree: Mapping[str, object], name: str, problems: list[Problem]) -> dict[str, object] | None:
    """The keys of one group; a group that is left out has none."""
    values = tree.get(name)
    if values is None:
        return {}
    if isinstance(values, Mapping):
        return {str(key): value for key, value in values.items()}
    problems.append(Problem(name, f"must be a group of keys, but is {show(values)}"))
    return None


def _task_group(values: Mapping[str, object] | None, problems: list[Problem]) -> TaskGroup | None:
    if values is None:
        return None
    target = values.get("_target_", NOT_GIVEN)
    options = {key: value for key, value in values.items() if key != "_target_"}
    if target == NOT_GIVEN:
        problems.append(Problem(TARGET, "must be given: the dotted path of a task's class, e.g. recipes.llama.LlamaTask"))
    elif not isinstance(target, str):
        problems.append(Problem(TARGET, f"must be the dotted path of a class, but is {show(target)}"))
    else:
        return TaskGroup(target, options)
    return None
