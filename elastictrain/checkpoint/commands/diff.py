"""`diff`: in what two checkpoints differ."""

import math
from collections.abc import Sequence
from typing import TypeVar

from elastictrain.checkpoint.commands.comparison import (
    DifferentTensor,
    Overview,
    compare_manifests,
    compare_values,
)
from elastictrain.checkpoint.commands.location import locate
from elastictrain.checkpoint.commands.selection import Checkpoint, find_checkpoint
from elastictrain.checkpoint.commands.speaking import progress, result, result_json
from elastictrain.checkpoint.commands.texts import plural, table
from elastictrain.checkpoint.manifest import JsonValue, TensorRecord
from elastictrain.errors import EXIT_OK

EXIT_DIFFERENT = 1

T = TypeVar("T")


def diff_checkpoints(a_url: str, b_url: str, *, limit: int, as_json: bool, key_env: str = "") -> int:
    """Compares two checkpoints, of runs the newest valid ones; 0 if they are equal, 1 if not.

    `limit` bounds every list of names that is shown; 0 for no bound.

    Raises: NoValidCheckpointError; InvalidCheckpointError naming the file if bytes are damaged; StorageError.
    """
    a, b = (find_checkpoint(locate(url, key_env=key_env)) for url in (a_url, b_url))
    overview = compare_manifests(a.manifest, b.manifest)
    with progress("comparing", total=overview.bytes_to_read, unit="B") as advance:
        tensors = compare_values(a, b, overview=overview, advance=advance)
    equal = not (tensors or overview.only_a or overview.only_b or overview.other_kind or overview.state)
    if as_json:
        result_json(_document(a, b, overview=overview, tensors=tensors, limit=limit))
    else:
        lines = [_heading(a, b), ""]
        if equal:
            lines.append(f"equal: {plural(overview.num_common, 'tensor')} and the state")
        else:
            lines += _sections(overview, tensors, limit=limit)
        result("\n".join(lines))
    return EXIT_OK if equal else EXIT_DIFFERENT


def _heading(a: Checkpoint, b: Checkpoint) -> str:
    rows = [
        (side, one.url, f"step {one.manifest.step}", f"world size {one.manifest.world_size}")
        for side, one in (("A", a), ("B", b))
    ]
    return table(rows[0], rows[1:], indent="")


def _sections(overview: Overview, tensors: Sequence[DifferentTensor], *, limit: int) -> list[str]:
    lines = [f"{len(tensors):,} of {plural(overview.num_common, 'common tensor')} differ in their values"]
    if tensors:
        header = ("tensor", "elements", "differing", "max abs", "relative")
        rows = [
            (
                one.pair.name,
                f"{one.difference.elements:,}",
                f"{one.difference.differing:,}",
                f"{one.difference.max_abs:.3g}",
                f"{one.difference.relative:.3g}",
            )
            for one in _first(tensors, limit)
        ]
        lines += [table(header, rows, right=header[1:]), *_rest(tensors, limit)]
    if overview.other_kind:
        pairs = _first(overview.other_kind, limit)
        rows_of_kinds = [(pair.name, _kind(pair.a), _kind(pair.b)) for pair in pairs]
        lines += ["", f"{plural(len(overview.other_kind), 'tensor')} of another shape or element type"]
        lines += [table(("tensor", "A", "B"), rows_of_kinds), *_rest(overview.other_kind, limit)]
    for side, names in (("A", overview.only_a), ("B", overview.only_b)):
        if names:
            lines += ["", f"{plural(len(names), 'tensor')} only in {side}", *(f"  {name}" for name in _first(names, limit))]
            lines += _rest(names, limit)
    if overview.state:
        keys = list(overview.state)
        rows_of_state = [(key, str(overview.state[key][0]), str(overview.state[key][1])) for key in _first(keys, limit)]
        lines += ["", f"{plural(len(keys), 'key')} of the state {'differs' if len(keys) == 1 else 'differ'}"]
        lines += [table(("key", "A", "B"), rows_of_state), *_rest(keys, limit)]
    return lines


def _document(a: Checkpoint, b: Checkpoint, *, overview: Overview, tensors: Sequence[DifferentTensor], limit: int) -> JsonValue:
    different: list[JsonValue] = [
        {
            "name": one.pair.name,
            "elements": one.difference.elements,
            "differing": one.difference.differing,
            "max_abs": _number(one.difference.max_abs),
            "relative": _number(one.difference.relative),
        }
        for one in _first(tensors, limit)
    ]
    other_kind: list[JsonValue] = [
        {"name": pair.name, "a": _kind_document(pair.a), "b": _kind_document(pair.b)}
        for pair in _first(overview.other_kind, limit)
    ]
    return {
        "a": {"url": a.url, "step": a.manifest.step, "world_size": a.manifest.world_size},
        "b": {"url": b.url, "step": b.manifest.step, "world_size": b.manifest.world_size},
        "common": overview.num_common,
        "differing": len(tensors),
        "tensors": different,
        "other_kind": other_kind,
        "only_a": list(_first(overview.only_a, limit)),
        "only_b": list(_first(overview.only_b, limit)),
        "state": {key: list(values) for key, values in overview.state.items()},
    }


def _kind(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _kind_document(record: TensorRecord) -> JsonValue:
    return {"dtype": record.dtype, "shape": list(record.shape)}


def _number(value: float) -> JsonValue:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


def _first(items: Sequence[T], limit: int) -> Sequence[T]:
    return items[:limit] if limit else items


def _rest(items: Sequence[object], limit: int) -> list[str]:
    more = len(items) - len(_first(items, limit))
    return [f"  and {more:,} more"] if more else []
