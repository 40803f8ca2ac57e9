"""YAML that a run wrote, as plain data: nothing in it is resolved, repeated, constructed or looked up.

What Hydra composes from is a person's own; what lies in a run's folder may come from anywhere.
"""

import math
import re
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

MOST_BYTES = 1 << 20
_MOST_DEPTH = 32
_MOST_INTEGER = 2**64

_FLOAT = re.compile(
    r"(?:[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_ESCAPED = re.compile(r"((?:\\\\)*)\\\$\{")
"""Of the backslashes before `${` each second one is escaped by the first, as in OmegaConf."""

_TAKEN = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "null")}


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Scalars as OmegaConf reads them: `1e-3` is a number, and there are no dates and no merging of keys."""

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
    """The value in `data`: mappings, lists, texts, finite numbers of 64 bits, truths and nothing.

    Raises: ValueError that says what the text must be and is not.
    """
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
    """Before anything is built: what can grow or construct is not there."""
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
