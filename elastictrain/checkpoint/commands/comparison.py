"""Compares two checkpoints: what their manifests tell, and the values of those tensors whose digests differ."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastictrain.checkpoint.commands.difference import Difference, difference
from elastictrain.checkpoint.commands.selection import Checkpoint
from elastictrain.checkpoint.commands.speaking import Advance
from elastictrain.checkpoint.commands.stored_tensor import read_box
from elastictrain.checkpoint.manifest import JsonValue, Manifest, TensorRecord
from elastictrain.checkpoint.verified_read import Folder

_AT_ONCE = 4
"""Tensors that are compared at once; each needs up to 150 MB with chunks of 32 MiB."""

_ABSENT = "(not there)"


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor that both have, under one name."""

    name: str
    a: TensorRecord
    b: TensorRecord

    @property
    def same_kind(self) -> bool:
        """Whether their values can be compared."""
        return (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)


@dataclass(frozen=True, slots=True)
class DifferentTensor:
    """A tensor whose values differ."""

    pair: Pair
    difference: Difference


@dataclass(frozen=True, slots=True)
class Overview:
    """What two manifests show without reading a tensor. `state` maps dotted keys that differ to both values."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    other_kind: tuple[Pair, ...]
    to_read: tuple[Pair, ...]
    """All others whose digests do not show that they are equal."""

    num_common: int
    state: Mapping[str, tuple[JsonValue, JsonValue]]

    @property
    def bytes_to_read(self) -> int:
        """At most, of both together."""
        return sum(chunk.size_bytes for pair in self.to_read for record in (pair.a, pair.b) for chunk in record.chunks)


def compare_manifests(a: Manifest, b: Manifest) -> Overview:
    """Pure."""
    pairs = [Pair(name, record, b.tensors[name]) for name, record in a.tensors.items() if name in b.tensors]
    return Overview(
        only_a=tuple(sorted(a.tensors.keys() - b.tensors.keys())),
        only_b=tuple(sorted(b.tensors.keys() - a.tensors.keys())),
        other_kind=tuple(pair for pair in pairs if not pair.same_kind),
        to_read=tuple(pair for pair in pairs if pair.same_kind and _boxes(pair.a) != _boxes(pair.b)),
        num_common=len(pairs),
        state=_state_differences(a.state, b.state),
    )


def compare_values(a: Checkpoint, b: Checkpoint, *, overview: Overview, advance: Advance) -> tuple[DifferentTensor, ...]:
    """Reads the tensors that may differ, chunk by chunk; those that do, worst first.

    Raises: DamagedFileError, StorageError.
    """

    def compare(pair: Pair) -> DifferentTensor:
        return DifferentTensor(pair, _compare_pair(pair, a=a.folder, b=b.folder, advance=advance))

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="diff") as pool:
        try:
            found = list(pool.map(compare, overview.to_read))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    different = [one for one in found if one.difference.differing]
    return tuple(sorted(different, key=lambda one: (-one.difference.relative, -one.difference.max_abs, one.pair.name)))


def _compare_pair(pair: Pair, *, a: Folder, b: Folder, advance: Advance) -> Difference:
    total = Difference()
    same_in_b = _boxes(pair.b)
    for chunk in pair.a.chunks:
        if chunk.size_bytes:
            values = read_box(a, pair.a, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
            if (chunk.offsets, chunk.sizes, chunk.digest) in same_in_b:
                # Read for its scale alone: what B has there is the same.
                others = values
            else:
                others = read_box(b, pair.b, offsets=chunk.offsets, sizes=chunk.sizes, threads=1)
            total = total.plus(difference(values, others))
            advance(2 * chunk.size_bytes)
    return total


def _boxes(record: TensorRecord) -> set[tuple[tuple[int, ...], tuple[int, ...], str]]:
    return {(chunk.offsets, chunk.sizes, chunk.digest) for chunk in record.chunks}


def _state_differences(a: Mapping[str, JsonValue], b: Mapping[str, JsonValue]) -> dict[str, tuple[JsonValue, JsonValue]]:
    flat_a, flat_b = _flatten(a, ""), _flatten(b, "")
    return {
        key: (flat_a.get(key, _ABSENT), flat_b.get(key, _ABSENT))
        for key in sorted(flat_a.keys() | flat_b.keys())
        if key not in flat_a or key not in flat_b or flat_a[key] != flat_b[key]
    }


def _flatten(state: Mapping[str, JsonValue], prefix: str) -> dict[str, JsonValue]:
    flat: dict[str, JsonValue] = {}
    for name, value in state.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
