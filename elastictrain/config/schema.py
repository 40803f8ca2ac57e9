"""Every key there is, with its type, default and docstring, read from the dataclasses' own source or the fields' metadata."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import get_type_hints

from elastictrain.config.composed import RunConfig, TaskGroup
from elastictrain.config.constraints import describe, show

GROUPS = tuple(field.name for field in fields(RunConfig))
"""Top-level names of a configuration."""

DATACLASSES: Mapping[str, type] = {
    name: hint
    for name, hint in get_type_hints(RunConfig).items()
    if isinstance(hint, type) and is_dataclass(hint) and hint is not TaskGroup
}
"""Groups whose keys are a dataclass of the program's own; `task` and `model` are declared by the task's class."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key, explained."""

    path: str
    must_be: str
    default: str | None
    """As one would write it; None if the key must be given."""
    doc: str


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field; empty for fields without, and where the source is not at hand."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in pairwise(statements):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def keys_of(cls: type, *, path: str) -> list[Key]:
    """The keys that the dataclass `cls` declares, in its order."""
    if not is_dataclass(cls):
        return []
    hints = get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    keys = []
    for field in fields(cls):
        key, hint = f"{path}.{field.name}", hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            keys += keys_of(hint, path=key)
            continue
        default = None if field.default is MISSING else show(field.default)
        if field.default_factory is not MISSING:
            default = show(field.default_factory())
        doc = docs.get(field.name) or field.metadata.get("doc", "")
        keys.append(Key(key, describe(hint), default, doc))
    return keys


@cache
def all_keys() -> tuple[str, ...]:
    """The dotted keys of all groups that are dataclasses, and `task._target_`."""
    return (*(key.path for name, cls in DATACLASSES.items() for key in keys_of(cls, path=name)), "task._target_")
