"""Takes nests of containers apart, and puts them together again: tensors by name, and the rest as JSON. No pickle."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from elastictrain.checkpoint.manifest import JsonValue

_KIND = "$"  # marks an object that stands for something else than a mapping with text as keys


class UnknownValueError(Exception):
    """A value that is neither a tensor nor a number, a text, a list, a tuple or a mapping of these."""


def take_apart(value: object, name: str, tensors: dict[str, Tensor]) -> JsonValue:
    """The JSON of `value`, which is called `name`, with the names of its tensors in their place; they are added to `tensors`.
    Raises: UnknownValueError naming the part that cannot be stored."""
    match value:
        case Tensor():
            tensors[name] = value
            return {_KIND: "tensor", "name": name}
        case float() if not math.isfinite(value):
            return {_KIND: "float", "value": repr(value)}
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            if all(isinstance(key, str) for key in value) and _KIND not in value:
                return {key: take_apart(one, f"{name}.{key}", tensors) for key, one in value.items()}
            pairs: list[JsonValue] = []
            for key, one in value.items():
                if not isinstance(key, int | str):
                    raise UnknownValueError(f"`{name}` has the key {key!r} of type {type(key).__name__}")
                pairs.append([key, take_apart(one, f"{name}.{key}", tensors)])
            return {_KIND: "mapping", "items": pairs}
        case list() | tuple():
            items = [take_apart(one, f"{name}.{index}", tensors) for index, one in enumerate(value)]
            return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        return take_apart(value.item(), name, tensors)
    raise UnknownValueError(f"`{name}` is of type {type(value).__name__}")


def put_together(document: JsonValue, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_apart`. Raises: KeyError naming a tensor that is not there."""
    if isinstance(document, list):
        return [put_together(one, tensors) for one in document]
    if not isinstance(document, dict):
        return document
    items: Any = document.get("items")
    match document.get(_KIND):
        case "tensor":
            return tensors[str(document["name"])]
        case "float":
            return float(str(document["value"]))
        case "mapping":
            return {key: put_together(one, tensors) for key, one in items}
        case "tuple":
            return tuple(put_together(one, tensors) for one in items)
    return {key: put_together(one, tensors) for key, one in document.items()}
