"""All keys with their type, default and docstring, read from the dataclasses' source or the fields' metadata."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from elastictrain.config.composed import RunConfig, TaskGroup
from elastictrain.config.constraints import describe, show
from elastictrain.config.validate import parameters_of

GROUPS = tuple(field.name for field in fields(RunConfig))

# groups whose keys are a dataclass of this package; the task's class declares `task` and `model`
DATACLASSES: Mapping[str, type] = {
    name: hint
    for name, hint in get_type_hints(RunConfig).items()
    if isinstance(hint, type) and is_dataclass(hint) and hint is not TaskGroup
}


@dataclass(frozen=True, slots=True)
class Key:
    path: str
    must_be: str
    default: str | None  # in YAML; None if the key must be given
    doc: str


def own_fields(cls: type) -> tuple[Field[Any], ...]:
    return fields(cls) if is_dataclass(cls) else ()


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field, or in its metadata; empty for fields without, and where the source is not available."""
    if docs := {one.name: one.metadata["doc"] for one in own_fields(cls) if "doc" in one.metadata}:
        return docs
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    docs = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in pairwise(statements):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def keys_of(cls: type, *, path: str) -> list[Key]:
    """The keys that `cls`, a dataclass or not, declares by its parameters, in its order."""
    docs = field_docs(cls)
    made = {one.name: one.default_factory() for one in own_fields(cls) if one.default_factory is not MISSING}
    keys = []
    for name, (hint, parameter) in parameters_of(cls).items():
        key = f"{path}.{name}"
        if isinstance(hint, type) and is_dataclass(hint):
            keys += keys_of(hint, path=key)
            continue
        default = None if parameter.default is inspect.Parameter.empty else show(made.get(name, parameter.default))
        keys.append(Key(key, describe(hint), default, docs.get(name, "")))
    return keys


@cache
def all_keys() -> tuple[str, ...]:
    """The dotted keys of all groups that are dataclasses, and `task._target_`."""
    return (*(key.path for name, cls in DATACLASSES.items() for key in keys_of(cls, path=name)), "task._target_")
