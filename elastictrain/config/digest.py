"""What identifies a configuration: its plain form, its digest, and the keys that change the answer of a run."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict

from omegaconf import OmegaConf

from elastictrain.config.composed import RunConfig
from elastictrain.config.schema import DATACLASSES
from elastictrain.config.stored_yaml import parse_stored_yaml
from elastictrain.errors import ConfigError

_ANSWER: Mapping[str, frozenset[str]] = {
    "run": frozenset({"seed", "num_threads"}),
    "data": frozenset({"path", "holdout_samples", "shuffle"}),
    "train": frozenset({"steps", "global_batch", "seq_len", "precision", "clip_norm"}),
    "optim": frozenset({"lr", "beta1", "beta2", "eps", "weight_decay", "schedule", "warmup_steps", "final_lr_ratio"}),
    "parallel": frozenset(),
    "checkpoint": frozenset(),
    "fault": frozenset(),
    "preflight": frozenset(),
    "telemetry": frozenset(),
    "launch": frozenset(),
}

_HOSTS_OWN_DATA_KEYS = frozenset({"cache_dir", "cache_gb", "workers", "prefetch"})

_HEADER = """\
# @package _global_
# The resolved configuration of this run. As a recipe in a folder of your own it starts the same run elsewhere:
# --config-dir DIR recipe=NAME run.dir=...
"""


def to_tree(config: RunConfig) -> dict[str, object]:
    """The plain mapping of the shape of conf/ that `config` was made from, complete with defaults."""
    task = {"_target_": config.task.target, **config.task.options}
    groups: dict[str, object] = {"run": asdict(config.run), "task": task, "model": dict(config.model)}
    groups |= {name: asdict(getattr(config, name), dict_factory=_as_in_yaml) for name in DATACLASSES if name != "run"}
    return groups


def _as_in_yaml(items: list[tuple[str, object]]) -> dict[str, object]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


def config_digest(config: RunConfig) -> str:
    """SHA-256 (64 hex digits) of every key, independent of their order and of how a number was written."""
    return hashlib.sha256(_canonical(to_tree(config)).encode()).hexdigest()


def group_digest(config: RunConfig, *, data_digest: str) -> str:
    """SHA-256 of what all ranks of a group must have in common: every key that is not one host's own business, and the data."""
    tree = to_tree(config)
    data = {key: value for key, value in asdict(config.data).items() if key not in _HOSTS_OWN_DATA_KEYS}
    checkpoint = {key: value for key, value in asdict(config.checkpoint).items() if key != "memory_dir"}
    # How many workers a host has, and how long it waits for others, concerns its launcher alone.
    own = {**tree, "data": data, "checkpoint": checkpoint, "launch": {}}
    return hashlib.sha256(_canonical([own, data_digest]).encode()).hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def answer_keys(config: RunConfig) -> dict[str, object]:
    """The keys that change what a run computes, dotted, with their values; what they leave out may change at any restart.

    - `run.seed`: everything random derives from it. `run.num_threads`: it changes the order of additions on a CPU.
      Not `dir` (where), `on_change` and `on_held` (how to go on), `deterministic` (how exactly a device repeats the same
      arithmetic).
    - `task.*`, `model.*`: all; what they mean is the task's business.
    - `data.path`, `holdout_samples`, `shuffle`: which sample comes when. Not caches, read-ahead and ledger.
    - `train.global_batch`, `seq_len`, `precision`, `clip_norm`; and `steps` where the learning rate decays towards the last
      step, so that a run with a constant schedule can be made longer. Not `micro_batch`, `compile`,
      `activation_checkpointing` (how the same sums are computed), `max_skipped` (when to give up), `eval_*` (only looked at).
    - `optim.*`: all, but not `final_lr_ratio` with a constant schedule, which does not read it.
    - Not `parallel`, `checkpoint`, `fault`, `preflight`, `telemetry`, `launch`: machines come and go.
    """
    return _answers(to_tree(config))


def _answers(tree: Mapping[str, object]) -> dict[str, object]:
    answers = _flatten(tree.get("task"), "task") | _flatten(tree.get("model"), "model")
    for group, names in _ANSWER.items():
        answers |= {key: value for key, value in _flatten(tree.get(group), group).items() if key.partition(".")[2] in names}
    if answers.get("optim.schedule") == "constant":
        for key in ("train.steps", "optim.final_lr_ratio"):
            answers.pop(key, None)
    return answers


def _flatten(values: object, path: str) -> dict[str, object]:
    if not isinstance(values, Mapping):
        return {path: list(values) if isinstance(values, tuple) else values} if values is not None or "." in path else {}
    return {key: value for name, one in values.items() for key, value in _flatten(one, f"{path}.{name}").items()}


def changed_answers(
    stored: Mapping[str, object], *, now: RunConfig, neutral: Collection[str] = ()
) -> list[tuple[str, object, object]]:
    """Each key that changes the answer and differs: (key, stored value, value now), in order of key.

    `stored` is the tree of a stored config.yaml (`from_yaml`). A key that only one side has counts, with None for the other.
    `neutral` names options of the task that do not count.
    """
    before, after = _answers(stored), answer_keys(now)
    keys = sorted((before.keys() | after.keys()) - {f"task.{name}" for name in neutral})
    differ = [key for key in keys if _canonical(_number(before.get(key))) != _canonical(_number(after.get(key)))]
    return [(key, before.get(key), after.get(key)) for key in differ]


def _number(value: object) -> object:
    """1 and 1.0 are the same setting."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_yaml(config: RunConfig) -> str:
    """The text of <run.dir>/config.yaml: complete, and itself a recipe."""
    return _HEADER + OmegaConf.to_yaml({name: _escaped(one) for name, one in to_tree(config).items()})


def _escaped(value: object) -> object:
    """A value that looks like an interpolation is text by now, and must be text again when read."""
    if isinstance(value, Mapping):
        return {name: _escaped(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def from_yaml(data: bytes | str, *, source: str) -> dict[str, object]:
    """The tree in a stored config.yaml; `source` is its URL, for the error. Nothing in it is resolved.

    Raises: ConfigError if it is not a mapping of plain values in YAML.
    """
    try:
        tree = parse_stored_yaml(data)
    except ValueError as error:
        raise ConfigError(f"{source} must be the YAML that a run wrote, but cannot be read: {error}") from error
    if not isinstance(tree, dict) or not tree or not all(isinstance(values, dict) for values in tree.values()):
        raise ConfigError(f"{source} must be the YAML that a run wrote, but holds no groups of keys")
    return {str(name): value for name, value in tree.items()}
