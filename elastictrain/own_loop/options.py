"""The options of a loop of one's own, as a configuration like that of a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elastictrain.config.command_line import parse_overrides, read_command_line
from elastictrain.config.compose import Composed, compose, read_choices
from elastictrain.config.composed import RunConfig
from elastictrain.config.constraints import flatten, show
from elastictrain.config.load import check_tree
from elastictrain.config.validate import NOT_GIVEN
from elastictrain.errors import ConfigError, Problem
from elastictrain.storage.opening import absolute_url

_GROUPS = ("checkpoint", "fault", "parallel", "preflight", "run", "telemetry")
_WITHOUT_EFFECT = frozenset(
    (
        *(f"fault.{key}" for key in ("step_timeout_s", "hang_multiple", "hang_floor_s", "straggler_exclude_after")),
        *("parallel.kind", "parallel.shard_size"),
        *("run.dir", "run.num_threads"),
        *("telemetry.progress", "telemetry.peak_tflops"),
    )
)
_OF_LAUNCHER = ("fault.", "parallel.", "preflight.", "checkpoint.memory_dir", "run.on_held")  # what the launcher acts by, too
_ENDLESS = 10**15  # steps: a loop of one's own ends by itself


@dataclass(frozen=True, slots=True)
class CommandLineOptions:
    """The part of a command line before `--`, which a program comes after."""

    overrides: tuple[str, ...] = ()
    composed: Composed | None = None  # what `compose` returns for them

    def given(self) -> frozenset[str]:
        """The keys that they set, and the groups for which they choose. Raises: UsageError."""
        line = read_command_line(self.overrides)
        choices, values, _ = parse_overrides(line.overrides, known=read_choices(line.config_dirs))
        return frozenset((*choices, *(one.key_or_group for one in values)))


def launcher_config(overrides: Sequence[str]) -> RunConfig:
    """What the launcher of a program knows of its run. Raises: UsageError; ConfigError naming the key."""
    composed = compose(overrides)
    url = _mapping(composed.tree["run"]).get("dir", NOT_GIVEN)
    if url == NOT_GIVEN:
        message = "must be given before `--`, as in the program: launchers meet in that folder"
        raise ConfigError([*composed.problems, Problem("run.dir", message)])
    config = own_config(str(url), {}, line=CommandLineOptions(tuple(overrides), composed))
    # The program decides how a batch is shared. A standby would run the program.
    return replace(config, train=replace(config.train, global_batch=_ENDLESS), launch=replace(config.launch, standbys=0))


def own_config(url: str, options: Mapping[str, object], *, line: CommandLineOptions = CommandLineOptions()) -> RunConfig:
    """`options`: groups of the configuration, each a mapping of keys to values. They are added to those of the command `line`,
    and must not contradict them. Raises: ConfigError naming the key."""
    composed = line.composed or compose(line.overrides)
    tree, problems = {**composed.tree}, [*composed.problems]
    for group, values in options.items():
        if group not in _GROUPS:
            problems.append(Problem(group, f"is not known: it must be one of {', '.join(_GROUPS)}"))
        elif not isinstance(values, Mapping):
            problems.append(Problem(group, f"must be a mapping of keys to values, but is {show(values)}"))
        else:
            idle = [key for key in values if f"{group}.{key}" in _WITHOUT_EFFECT]
            problems += [Problem(f"{group}.{key}", "has no effect on a loop of one's own: leave it out") for key in idle]
    if not isinstance(url, str) or not url:
        problems.append(Problem("url", f"must be a path or URL of the run's folder, but is {show(url)}"))
    elif line.overrides:
        problems += _contradictions(url, options, tree, line)
    for group, values in options.items():
        tree[group] = _merged(tree.get(group), values)
    tree["run"] = {**_mapping(tree["run"]), "dir": url}
    tree["train"] = {
        **_mapping(tree["train"]),
        "steps": _ENDLESS,
        "global_batch": 1,
        "micro_batch": 1,
        "eval_every_steps": 0,
    }
    fault = _mapping(tree["fault"])
    if isinstance(limit_s := fault.get("init_timeout_s"), int | float):
        # The ladder of limits: a shorter one has no effect here.
        save_s = fault.get("save_timeout_s")
        longer = {"save_timeout_s": limit_s + 1.0} if isinstance(save_s, int | float) and save_s <= limit_s else {}
        tree["fault"] = {**fault, "step_timeout_s": limit_s, **longer}
    tree["task"], tree["model"] = {"_target_": "elastictrain.attach"}, {}
    if _mapping(tree["fault"]).get("on_poisoned") == "skip":
        message = '"skip" has no effect on a loop of one\'s own, which chooses its batches: set "stop" or "back"'
        problems.append(Problem("fault.on_poisoned", message))
    if problems:
        raise ConfigError(problems)
    config, problems = check_tree(tree, with_task=False)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _contradictions(
    url: str, options: Mapping[str, object], tree: Mapping[str, object], line: CommandLineOptions
) -> Iterator[Problem]:
    """What is wrong with the command line, and where the program says something else."""
    told, given = dict(flatten(tree)), line.given()
    for key in sorted(given - {"run.dir"}):
        if key.partition(".")[0] not in (*_GROUPS, "launch") or key in (*_WITHOUT_EFFECT, "parallel", "launch.standbys"):
            yield Problem(key, "has no effect on a program with a loop of its own: leave it out")
    for key, value in (("run.dir", url), *flatten(options)):
        of_line = told.get(key, value)
        if key == "run.dir":
            differs = absolute_url(str(of_line)) != absolute_url(str(value))
        else:
            chosen = key in given or key.partition(".")[0] in given or key.startswith(_OF_LAUNCHER)
            differs = chosen and of_line != value and key not in _WITHOUT_EFFECT
        if differs:
            message = f"must be {show(of_line)}, as the command line has it before `--`, but is {show(value)} in the program"
            yield Problem(key, f"{message}: give {key}={show(value)} before `--`, or leave it out of the program")


def _merged(before: object, values: object) -> object:
    if not isinstance(values, Mapping):
        return values
    before = _mapping(before)
    return {**before, **{key: _merged(before.get(key), value) for key, value in values.items()}}


def _mapping(group: object) -> Mapping[str, object]:
    return group if isinstance(group, Mapping) else {}
