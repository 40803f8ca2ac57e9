"""Does a checkpoint fit the state it is to be loaded into? Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import TensorRecord

NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What must agree; `shape` is that of the whole tensor."""

    dtype: str
    shape: tuple[int, ...]


def describe_mismatch(
    tensors: Mapping[str, TensorFacts], stored: Mapping[str, TensorRecord], *, optional: Collection[str]
) -> str | None:
    """What differs, by tensor; None if the checkpoint fits.

    `optional` names need not be stored. Stored names that nobody asks for are a mismatch, too (a layer was removed), in those
    families (`model`, `optim`: the part before the first dot) whose given names are all required.
    """
    families = {_family(name) for name in tensors} - {_family(name) for name in optional}
    lines = [f"{name} is not stored" for name in sorted(tensors) if name not in stored and name not in optional]
    lines += [
        f"{name} is stored, but the run has none"
        for name in sorted(stored)
        if name not in tensors and _family(name) in families
    ]
    for name in sorted(tensors.keys() & stored.keys()):
        want, have = tensors[name], stored[name]
        if want.shape != have.shape:
            lines.append(f"{name} is stored with shape {list(have.shape)}, but the run's has {list(want.shape)}")
        elif want.dtype != have.dtype:
            lines.append(f"{name} is stored as {have.dtype}, but the run's is {want.dtype}")
    if not lines:
        return None
    rest = f"\n  - and {len(lines) - NAMED_AT_MOST} more" if len(lines) > NAMED_AT_MOST else ""
    return "".join(f"\n  - {line}" for line in lines[:NAMED_AT_MOST]) + rest


def _family(name: str) -> str:
    return name.partition(".")[0]
