"""The options of a loop of one's own, as a configuration like that of a recipe."""

from collections.abc import Mapping

from elastictrain.config.compose import compose
from elastictrain.config.composed import RunConfig
from elastictrain.config.constraints import show
from elastictrain.config.load import check_tree
from elastictrain.errors import ConfigError, Problem

_GROUPS = ("checkpoint", "fault", "parallel", "preflight", "run", "telemetry")
_WITHOUT_EFFECT = frozenset(
    (
        *(f"fault.{key}" for key in ("step_timeout_s", "hang_multiple", "hang_floor_s", "straggler_exclude_after")),
        *("parallel.kind", "parallel.shard_size"),
        *("run.dir", "run.num_threads"),
        *("telemetry.progress", "telemetry.peak_tflops"),
    )
)
_ENDLESS = 10**15  # steps: a loop of one's own ends by itself


def own_config(url: str, options: Mapping[str, object]) -> RunConfig:
    """`options`: groups of the configuration, each a mapping of keys to values. Raises: ConfigError naming the key."""
    tree, problems = compose(()).tree, []
    for group, values in options.items():
        if group not in _GROUPS:
            problems.append(Problem(group, f"is not known: it must be one of {', '.join(_GROUPS)}"))
        elif not isinstance(values, Mapping):
            problems.append(Problem(group, f"must be a mapping of keys to values, but is {show(values)}"))
        else:
            idle = [key for key in values if f"{group}.{key}" in _WITHOUT_EFFECT]
            problems += [Problem(f"{group}.{key}", "has no effect on a loop of one's own: leave it out") for key in idle]
            tree[group] = {**_mapping(tree[group]), **values}
    if not isinstance(url, str) or not url:
        problems.append(Problem("url", f"must be a path or URL of the run's folder, but is {show(url)}"))
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
        tree["fault"] = {**fault, "step_timeout_s": limit_s}
    tree["task"], tree["model"] = {"_target_": "elastictrain.attach"}, {}
    if problems:
        raise ConfigError(problems)
    config, problems = check_tree(tree, with_task=False)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _mapping(group: object) -> Mapping[str, object]:
    return group if isinstance(group, Mapping) else {}
