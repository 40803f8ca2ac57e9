"""`diff`: in what two checkpoints differ."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from elastictrain.checkpoint.commands.output import Advance, plural, progress, result, result_json, table
from elastictrain.checkpoint.commands.survey import Checkpoint, find_checkpoint, locate
from elastictrain.checkpoint.manifest import JsonValue, Manifest, TensorRecord
from elastictrain.checkpoint.tensor_bytes import read_box
from elastictrain.checkpoint.verified_read import CheckpointFolder
from elastictrain.errors import EXIT_OK

EXIT_DIFFERENT = 1

_NUMBERS_AT_ONCE = 1 << 18
"""Elements that are widened to 64 bits at once."""

_TENSORS_AT_ONCE = 4
"""Tensors that are compared at once; each needs up to 150 MB with chunks of 32 MiB."""

_ABSENT = "(not there)"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far values are apart from those of A. NaN equals NaN, and 0.0 equals -0.0."""

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    """Largest |A - B|; infinite where only one of them is NaN."""

    scale: float = 0.0
    """Largest finite |A|."""

    @property
    def relative(self) -> float:
        """`max_abs` / `scale`."""
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
    """Of two tensors of one shape and element type, on the CPU."""
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


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor that both have, under one name."""

    name: str
    a: TensorRecord
    b: TensorRecord

    @property
    def same_kind(self) -> bool:
        return (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)


@dataclass(frozen=True, slots=True)
class Overview:
    """What two manifests show without reading a tensor. `state` maps dotted keys that differ to both values."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_kind: tuple[TensorPair, ...]
    to_read: tuple[TensorPair, ...]
    """All others whose digests do not show that they are equal."""

    num_common: int
    state: Mapping[str, tuple[JsonValue, JsonValue]]

    @property
    def bytes_to_read(self) -> int:
        """At most, of both together."""
        return sum(chunk.size_bytes for pair in self.to_read for record in (pair.a, pair.b) for chunk in record.chunks)


def compare_manifests(a: Manifest, b: Manifest) -> Overview:
    """Pure."""
    pairs = [TensorPair(name, record, b.tensors[name]) for name, record in a.tensors.items() if name in b.tensors]
    flat_a, flat_b = _flatten(a.state, ""), _flatten(b.state, "")
    return Overview(
        only_a=tuple(sorted(a.tensors.keys() - b.tensors.keys())),
        only_b=tuple(sorted(b.tensors.keys() - a.tensors.keys())),
        other_kind=tuple(pair for pair in pairs if not pair.same_kind),
        to_read=tuple(pair for pair in pairs if pair.same_kind and _boxes(pair.a) != _boxes(pair.b)),
        num_common=len(pairs),
        state={
            key: (flat_a.get(key, _ABSENT), flat_b.get(key, _ABSENT))
            for key in sorted(flat_a.keys() | flat_b.keys())
            if key not in flat_a or key not in flat_b or flat_a[key] != flat_b[key]
        },
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


class DifferentTensor(msgspec.Struct, frozen=True):
    """A tensor whose values differ, as it is shown."""

    name: str
    elements: int
    differing: int
    max_abs: float
    relative: float


def compare_values(a: Checkpoint, b: Checkpoint, *, overview: Overview, advance: Advance) -> list[DifferentTensor]:
    """Reads the tensors that may differ, chunk by chunk; those that do, worst first.

    Raises: DamagedFileError, StorageError.
    """

    def compare(pair: TensorPair) -> DifferentTensor:
        found = _compare_pair(pair, a=a.folder, b=b.folder, advance=advance)
        return DifferentTensor(pair.name, found.elements, found.differing, found.max_abs, found.relative)

    with ThreadPoolExecutor(_TENSORS_AT_ONCE, thread_name_prefix="diff") as pool:
        try:
            found = list(pool.map(compare, overview.to_read))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return sorted((one for one in found if one.differing), key=lambda one: (-one.relative, -one.max_abs, one.name))


def _compare_pair(pair: TensorPair, *, a: CheckpointFolder, b: CheckpointFolder, advance: Advance) -> Difference:
    total = Difference()
    same_in_b = _boxes(pair.b)
    for chunk in pair.a.chunks:
        if chunk.size_bytes:
            values = read_box(a, pair.a, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
            # Where B has the same, A is read for its scale alone.
            same = (chunk.offsets, chunk.sizes, chunk.digest) in same_in_b
            others = values if same else read_box(b, pair.b, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
            total = total.plus(difference(values, others))
            advance(2 * chunk.size_bytes)
    return total


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
        result_json(_document(a, b, overview=overview, tensors=tensors, limit=limit or None))
    else:
        sides = [
            (side, one.url, f"step {one.manifest.step}", f"world size {one.manifest.world_size}")
            for side, one in (("A", a), ("B", b))
        ]
        lines = [table(sides[0], sides[1:], indent=""), ""]
        if equal:
            lines.append(f"equal: {plural(overview.num_common, 'tensor')} and the state")
        else:
            lines += _sections(overview, tensors, limit=limit or None)
        result("\n".join(lines))
    return EXIT_OK if equal else EXIT_DIFFERENT


def _sections(overview: Overview, tensors: Sequence[DifferentTensor], *, limit: int | None) -> list[str]:
    lines = [f"{len(tensors):,} of {plural(overview.num_common, 'common tensor')} differ in their values"]
    if tensors:
        header = ("tensor", "elements", "differing", "max abs", "relative")
        rows = [
            (one.name, f"{one.elements:,}", f"{one.differing:,}", f"{one.max_abs:.3g}", f"{one.relative:.3g}")
            for one in tensors
        ]
        lines += [table(header, rows[:limit], right=header[1:]), *_rest(rows, limit)]
    if overview.other_kind:
        kinds = [(pair.name, _kind(pair.a), _kind(pair.b)) for pair in overview.other_kind]
        lines += ["", f"{plural(len(kinds), 'tensor')} of another shape or element type"]
        lines += [table(("tensor", "A", "B"), kinds[:limit]), *_rest(kinds, limit)]
    for side, names in (("A", overview.only_a), ("B", overview.only_b)):
        if names:
            lines += ["", f"{plural(len(names), 'tensor')} only in {side}", *(f"  {name}" for name in names[:limit])]
            lines += _rest(names, limit)
    if overview.state:
        states = [(key, str(a), str(b)) for key, (a, b) in overview.state.items()]
        lines += ["", f"{plural(len(states), 'key')} of the state {'differs' if len(states) == 1 else 'differ'}"]
        lines += [table(("key", "A", "B"), states[:limit]), *_rest(states, limit)]
    return lines


def _rest(items: Sequence[object], limit: int | None) -> list[str]:
    more = len(items) - len(items[:limit])
    return [f"  and {more:,} more"] if more else []


def _kind(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def _document(
    a: Checkpoint, b: Checkpoint, *, overview: Overview, tensors: Sequence[DifferentTensor], limit: int | None
) -> dict[str, object]:
    # JSON has no infinity.
    different = [
        {name: "inf" if value == math.inf else value for name, value in msgspec.to_builtins(one).items()}
        for one in tensors[:limit]
    ]
    other_kind = [
        {"name": pair.name, "a": _kind_document(pair.a), "b": _kind_document(pair.b)} for pair in overview.other_kind[:limit]
    ]
    return {
        "a": {"url": a.url, "step": a.manifest.step, "world_size": a.manifest.world_size},
        "b": {"url": b.url, "step": b.manifest.step, "world_size": b.manifest.world_size},
        "common": overview.num_common,
        "differing": len(tensors),
        "tensors": different,
        "other_kind": other_kind,
        "only_a": list(overview.only_a[:limit]),
        "only_b": list(overview.only_b[:limit]),
        "state": {key: list(values) for key, values in overview.state.items()},
    }


def _kind_document(record: TensorRecord) -> dict[str, object]:
    return {"dtype": record.dtype, "shape": list(record.shape)}
