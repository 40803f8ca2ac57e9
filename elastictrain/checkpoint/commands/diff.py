"""`diff`: compare two checkpoints."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastictrain.checkpoint.commands.output import plural, result, result_json, table
from elastictrain.checkpoint.commands.survey import find_checkpoint, locate
from elastictrain.checkpoint.manifest import JsonValue, Manifest, TensorRecord
from elastictrain.checkpoint.tensor_bytes import read_box
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.entry_point import progress
from elastictrain.errors import EXIT_OK

EXIT_DIFFERENT = 1

_NUMBERS_AT_ONCE = 1 << 18  # elements widened to 64 bits at once
_TENSORS_AT_ONCE = 4  # tensors compared at once; each needs up to 150 MB with chunks of 32 MiB
_ABSENT = "(not there)"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the values of B are from those of A. NaN equals NaN, and 0.0 equals -0.0."""

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0  # largest |A - B|; infinite where only one of them is NaN
    scale: float = 0.0  # largest finite |A|

    @property
    def relative(self) -> float:
        if not self.differing:
            return 0.0
        return self.max_abs / self.scale if self.scale else math.inf

    def plus(self, other: "Difference") -> "Difference":
        return Difference(
            self.elements + other.elements,
            self.differing + other.differing,
            max(self.max_abs, other.max_abs),
            max(self.scale, other.scale),
        )


def difference(a: Tensor, b: Tensor) -> Difference:
    total = Difference()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    floating = a.is_floating_point() or a.is_complex()
    for begin in range(0, flat_a.numel(), _NUMBERS_AT_ONCE):
        part_a, part_b = flat_a[begin : begin + _NUMBERS_AT_ONCE], flat_b[begin : begin + _NUMBERS_AT_ONCE]
        total = total.plus(_of_floats(part_a, part_b) if floating else _of_integers(part_a, part_b))
    return total


def _of_floats(a: Tensor, b: Tensor) -> Difference:
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    differs = ~((x == y) | (x.isnan() & y.isnan()))
    sizes = x.abs()
    finite = sizes[sizes.isfinite()]
    apart = (x - y).abs()[differs].nan_to_num(nan=math.inf, posinf=math.inf)
    return Difference(
        elements=x.numel(),
        differing=int(differs.sum()),
        max_abs=float(apart.max()) if apart.numel() else 0.0,
        scale=float(finite.max()) if finite.numel() else 0.0,
    )


def _of_integers(a: Tensor, b: Tensor) -> Difference:
    x, y = (one.to(torch.uint8).numpy() if one.dtype == torch.bool else one.numpy() for one in (a, b))
    # Modulo 2^64 the difference of greater and smaller is exact for every integer type.
    apart = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    return Difference(
        elements=x.size,
        differing=int(np.count_nonzero(apart)),
        max_abs=float(apart.max(initial=0)),
        scale=float(max(abs(int(x.min())), abs(int(x.max())))),
    )


TensorPair = tuple[TensorRecord, TensorRecord]  # the records of a common tensor in A and in B


@dataclass(frozen=True, slots=True)
class Overview:
    """How two manifests differ. `state` maps dotted keys that differ to both values."""

    only_a: list[str]
    only_b: list[str]
    other_kind: dict[str, TensorPair]
    to_read: dict[str, TensorPair]  # all other common tensors whose digests differ
    num_common: int
    state: dict[str, tuple[JsonValue, JsonValue]]


def compare_manifests(a: Manifest, b: Manifest) -> Overview:
    """What differs by the manifests alone, and which tensors must be read."""
    pairs = {name: (record, b.tensors[name]) for name, record in a.tensors.items() if name in b.tensors}
    same = {name for name, (one, other) in pairs.items() if (one.dtype, one.shape) == (other.dtype, other.shape)}
    flat_a, flat_b = _flatten(a.state, ""), _flatten(b.state, "")
    both = {key: (flat_a.get(key, _ABSENT), flat_b.get(key, _ABSENT)) for key in sorted(flat_a.keys() | flat_b.keys())}
    return Overview(
        only_a=sorted(a.tensors.keys() - b.tensors.keys()),
        only_b=sorted(b.tensors.keys() - a.tensors.keys()),
        other_kind={name: pair for name, pair in pairs.items() if name not in same},
        to_read={name: (one, other) for name, (one, other) in pairs.items() if name in same and _boxes(one) != _boxes(other)},
        num_common=len(pairs),
        state={key: values for key, values in both.items() if not (key in flat_a and key in flat_b and values[0] == values[1])},
    )


def _flatten(state: Mapping[str, JsonValue], prefix: str) -> dict[str, JsonValue]:
    flat: dict[str, JsonValue] = {}
    for name, value in state.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _boxes(record: TensorRecord) -> set[tuple[tuple[int, ...], tuple[int, ...], str]]:
    return {(chunk.offsets, chunk.sizes, chunk.digest) for chunk in record.chunks}


def compare_values(pairs: Mapping[str, TensorPair], *, a: CheckpointFolder, b: CheckpointFolder) -> dict[str, Difference]:
    """Read the tensors of `pairs`; those that differ, worst first. Raises: DamagedFileError, StorageError."""
    # An upper bound: equal chunks of B are not read.
    total = sum(chunk.size_bytes for pair in pairs.values() for record in pair for chunk in record.chunks)
    with (
        progress("comparing", total) as advance,
        ThreadPoolExecutor(_TENSORS_AT_ONCE, thread_name_prefix="diff") as pool,
    ):

        def compare(pair: TensorPair) -> Difference:
            """Goes by the chunks of A; B may be cut otherwise. Raises: DamagedFileError, StorageError."""
            one, other = pair
            apart, same_in_b = Difference(), _boxes(other)
            for chunk in one.chunks:
                if chunk.size_bytes:
                    values = read_box(a, one, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
                    # Of an equal chunk only A is read, for the scale.
                    same = (chunk.offsets, chunk.sizes, chunk.digest) in same_in_b
                    others = values if same else read_box(b, other, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
                    apart = apart.plus(difference(values, others))
                    advance(2 * chunk.size_bytes)
            return apart

        found = list(pool.map(compare, pairs.values()))
    differing = [(name, one) for name, one in zip(pairs, found, strict=True) if one.differing]
    return dict(sorted(differing, key=lambda item: (-item[1].relative, -item[1].max_abs, item[0])))


def diff_checkpoints(a_url: str, b_url: str, *, limit: int, as_json: bool, key_env: str = "") -> int:
    """Compare two checkpoints, of a run the newest valid one. Returns 0 if they are equal, else 1.

    `limit` (0: none) bounds each list of names. Raises: NoValidCheckpointError; InvalidCheckpointError if bytes are damaged;
    StorageError.
    """
    a, b = (find_checkpoint(locate(url, key_env=key_env)) for url in (a_url, b_url))
    overview = compare_manifests(a.manifest, b.manifest)
    values = compare_values(overview.to_read, a=a.folder, b=b.folder)
    sides = {
        side: {"url": one.url, "step": one.manifest.step, "world_size": one.manifest.world_size}
        for side, one in (("a", a), ("b", b))
    }
    equal = not (values or overview.only_a or overview.only_b or overview.other_kind or overview.state)
    if as_json:
        result_json(sides | _document(overview, values, limit=limit or None))
    else:
        rows = [
            (name.upper(), str(one["url"]), f"step {one['step']}", f"world size {one['world_size']}")
            for name, one in sides.items()
        ]
        same = f"equal: {plural(overview.num_common, 'tensor')} and the state"
        result(f"{table(rows[0], rows[1:], indent='')}\n\n{same if equal else _text(overview, values, limit=limit or None)}")
    return EXIT_OK if equal else EXIT_DIFFERENT


def _text(overview: Overview, values: Mapping[str, Difference], *, limit: int | None) -> str:
    figures = [
        (name, f"{one.elements:,}", f"{one.differing:,}", f"{one.max_abs:.3g}", f"{one.relative:.3g}")
        for name, one in values.items()
    ]
    kinds = [(name, *(f"{one.dtype} {list(one.shape)}" for one in pair)) for name, pair in overview.other_kind.items()]
    state = [(key, str(a), str(b)) for key, (a, b) in overview.state.items()]
    sections: list[tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]] = [
        (
            f"{len(values):,} of {plural(overview.num_common, 'common tensor')} differ in their values",
            ("tensor", "elements", "differing", "max abs", "relative"),
            figures,
        ),
        (f"{plural(len(kinds), 'tensor')} of another shape or element type", ("tensor", "A", "B"), kinds),
        (f"{plural(len(overview.only_a), 'tensor')} only in A", (), [(name,) for name in overview.only_a]),
        (f"{plural(len(overview.only_b), 'tensor')} only in B", (), [(name,) for name in overview.only_b]),
        (f"{plural(len(state), 'key')} of the state {'differs' if len(state) == 1 else 'differ'}", ("key", "A", "B"), state),
    ]
    texts = []
    for title, header, rows in sections:
        if not rows and rows is not figures:
            continue
        shown, lines = rows[:limit], [title]
        if shown:
            lines.append(table(header, shown, right=header[1:] if rows is figures else ()))
        if len(rows) > len(shown):
            lines.append(f"  and {len(rows) - len(shown):,} more")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _document(overview: Overview, values: Mapping[str, Difference], *, limit: int | None) -> dict[str, object]:
    # JSON has no infinity.
    tensors = [
        {
            "name": name,
            "elements": one.elements,
            "differing": one.differing,
            "max_abs": "inf" if one.max_abs == math.inf else one.max_abs,
            "relative": "inf" if one.relative == math.inf else one.relative,
        }
        for name, one in list(values.items())[:limit]
    ]
    other_kind = [
        {"name": name} | {side: {"dtype": one.dtype, "shape": one.shape} for side, one in zip("ab", pair, strict=True)}
        for name, pair in list(overview.other_kind.items())[:limit]
    ]
    return {
        "common": overview.num_common,
        "differing": len(values),
        "tensors": tensors,
        "other_kind": other_kind,
        "only_a": overview.only_a[:limit],
        "only_b": overview.only_b[:limit],
        "state": overview.state,
    }
