"""The identity of a configuration: its plain form, its digest, the keys that change a run's answer, and its stored YAML.

Hydra composes only the user's own files. A file in a run folder may come from anywhere, so it may hold no interpolation,
alias, tag or anchor.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from elastictrain.config.composed import RunConfig
from elastictrain.config.constraints import plain
from elastictrain.config.schema import GROUPS
from elastictrain.errors import ConfigError

_ANSWER: Mapping[str, frozenset[str]] = {
    "run": frozenset({"seed", "num_threads"}),
    "data": frozenset({"path", "sources", "packing", "holdout_samples", "shuffle"}),
    "train": frozenset({"steps", "global_batch", "seq_len", "precision", "fp8_scaling", "clip_norm", "init_from", "ema"}),
    "optim": frozenset(
        {
            *("_target_", "arguments", "lr", "beta1", "beta2", "eps", "weight_decay"),
            *("schedule", "warmup_steps", "final_lr_ratio"),
        }
    ),
}

_HOSTS_OWN = {"data": frozenset({"cache_dir", "cache_gb", "workers", "prefetch"}), "checkpoint": frozenset({"memory_dir"})}

_HEADER = """\
# @package _global_
# The resolved configuration of this run. As a recipe in a folder of your own it starts the same run elsewhere:
# --config-dir DIR recipe=NAME run.dir=...
"""

MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_MOST_INTEGER = 2**64

_FLOAT = re.compile(
    r"(?:[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_ESCAPED = re.compile(r"((?:\\\\)*)\\\$\{")  # of the backslashes before `${` each second one is escaped, as in OmegaConf
_TAKEN = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "null")}


def to_tree(config: RunConfig) -> dict[str, object]:
    """The plain mapping of the shape of conf/ for `config`, complete with defaults."""
    groups = {name: plain(getattr(config, name)) for name in GROUPS}
    return groups | {"task": {"_target_": config.task.target, **config.task.options}}


def config_digest(config: RunConfig) -> str:
    """SHA-256 (64 hex digits) of every key, independent of their order and of how a number was written."""
    return hashlib.sha256(_canonical(to_tree(config)).encode()).hexdigest()


def group_digest(config: RunConfig, *, data_digest: str) -> str:
    """SHA-256 of the data and of every key in which all ranks of a group must agree."""
    tree: dict[str, Any] = to_tree(config)
    for group, keys in _HOSTS_OWN.items():
        tree[group] = {key: value for key, value in tree[group].items() if key not in keys}
    # The number of workers of a host, and its waiting times, concern its launcher alone.
    return hashlib.sha256(_canonical([{**tree, "launch": {}}, data_digest]).encode()).hexdigest()


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def answer_keys(tree: Mapping[str, object]) -> dict[str, object]:
    """The keys in the tree of a configuration that change what a run computes, dotted, with their values; other keys may change
    at any restart.

    - `run.seed`: everything random derives from it. `run.num_threads`: it changes the order of additions on a CPU.
      Not `dir` (where), `on_change` and `on_held` (how to resume), `deterministic` (how exactly a device repeats the same
      arithmetic).
    - `task.*`, `model.*`: all; only the task knows their meaning.
    - `data.path`, `sources`, `packing`, `holdout_samples`, `shuffle`: the order of samples. Not caches, read-ahead and ledger.
    - `train.global_batch`, `seq_len`, `precision`, `clip_norm`, `init_from`, `ema`; `fp8_scaling` where `precision` is fp8; and
      `steps` where the learning rate decays towards the last step, so that a run with a constant schedule can be made longer.
      Not `micro_batch`, `compile`, `activation_checkpointing` (how the same sums are computed), `max_skipped` (when to give
      up), `eval_*` (only looked at), `stop_after_evals_without_gain` (when to end).
    - `optim.*`: all, but not `final_lr_ratio` with a constant schedule, which does not read it.
    - Not `parallel`, `checkpoint`, `fault`, `preflight`, `telemetry`, `launch`: machines come and go.
    """
    answers = _flatten(tree.get("task"), "task") | _flatten(tree.get("model"), "model")
    for group, names in _ANSWER.items():
        answers |= {key: value for key, value in _flatten(tree.get(group), group).items() if key.split(".")[1] in names}
    if answers.get("optim.schedule") == "constant":
        for key in ("train.steps", "optim.final_lr_ratio"):
            answers.pop(key, None)
    if answers.get("train.precision") != "fp8":
        answers.pop("train.fp8_scaling", None)
    return answers


def _flatten(values: object, path: str) -> dict[str, object]:
    if not isinstance(values, Mapping):
        return {path: list(values) if isinstance(values, tuple) else values} if values is not None or "." in path else {}
    return {key: value for name, one in values.items() for key, value in _flatten(one, f"{path}.{name}").items()}


def changed_answers(
    stored: Mapping[str, object], *, now: RunConfig, neutral: Collection[str] = ()
) -> list[tuple[str, object, object]]:
    """Each key that changes the answer and differs: (key, stored value, value now), in order of key. `stored` is the tree of a
    stored config.yaml (`from_yaml`). A key that only one side has counts, with None for the other. `neutral` names options of
    the task that do not count."""
    # Runs of older releases did not pack, and do not say so.
    before, after = {"data.packing": False} | answer_keys(stored), answer_keys(to_tree(now))
    keys = sorted((before.keys() | after.keys()) - {f"task.{name}" for name in neutral})
    differ = [key for key in keys if _canonical(_number(before.get(key))) != _canonical(_number(after.get(key)))]
    return [(key, before.get(key), after.get(key)) for key in differ]


def _number(value: object) -> object:
    """1 and 1.0 are the same setting."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_yaml(config: RunConfig) -> str:
    """The text of <run.dir>/config.yaml: complete, and itself a recipe."""
    from omegaconf import OmegaConf  # a saver only reads, and half of its start would be this import

    return _HEADER + OmegaConf.to_yaml({name: _escaped(one) for name, one in to_tree(config).items()})


def _escaped(value: object) -> object:
    """Escape a text that looks like an interpolation, so that it is read as text again."""
    if isinstance(value, Mapping):
        return {name: _escaped(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def from_yaml(data: bytes | str, *, source: str) -> dict[str, object]:
    """The tree in a stored config.yaml, whose URL is `source`. Raises: ConfigError if it is no mapping of plain values."""
    try:
        tree = parse_stored_yaml(data)
    except ValueError as error:
        raise ConfigError(f"{source} must be the YAML that a run wrote, but cannot be read: {error}") from error
    if not isinstance(tree, dict) or not tree or not all(isinstance(values, dict) for values in tree.values()):
        raise ConfigError(f"{source} must be the YAML that a run wrote, but holds no groups of keys")
    return {str(name): value for name, value in tree.items()}


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Reads scalars as OmegaConf does: `1e-3` is a number, and there are no dates and no merging of keys. OmegaConf itself
    parses interpolations even where none is resolved, and takes two minutes for 800 kB of `${`."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if not all(isinstance(name, str | int | float | bool) for name in names):
            raise ValueError("its keys must be texts or numbers, but one is not")
        if len(set(names)) != len(names):
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise ValueError(f"it must have each key once, but has {twice!r} more than once")
        return dict(super().construct_mapping(node, deep=deep))


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAKEN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_stored_yaml(data: bytes | str) -> object:
    """The plain value in `data`. Raises: ValueError that names the rule which the text breaks."""
    raw = data.encode("utf-8", errors="surrogatepass") if isinstance(data, str) else data
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it must have at most {MOST_BYTES} bytes, but has {len(raw)}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it must be UTF-8, but is not at byte {error.start}") from error
    try:
        _check_events(text)
        value = yaml.load(text, Loader=_PlainLoader)  # noqa: S506 -- a SafeLoader that does less
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it must be YAML, but is garbled: {error}") from error
    return _plain(value)


def _check_events(text: str) -> None:
    """Refuse aliases, anchors, tags and deep nesting before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        at = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it must repeat nothing by reference, but {at} has the alias *{event.anchor}")
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"it must repeat nothing by reference, but {at} has the anchor &{event.anchor}")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"it must have plain values, but {at} has the tag {event.tag}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ValueError(f"it must have at most {_MOST_DEPTH} nested groups and lists, but has more in {at}")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        if (found := _INTERPOLATION.search(value)) is not None:
            raise ValueError(
                f"it must have plain values, but has the interpolation {value[found.start() : found.start() + 40]!r}"
            )
        return _ESCAPED.sub(lambda found: "\\" * (len(found[1]) // 2) + "${", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it must have finite numbers, but has {value}")
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise ValueError("it must have integers of at most 64 bits, but has a larger one")
    return value
