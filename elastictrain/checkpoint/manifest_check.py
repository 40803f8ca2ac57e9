"""What must hold between the parts of a manifest, so that readers may index and allocate without looking. Free of torch."""

import math

from elastictrain.checkpoint.counters import counters_of
from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.manifest import ChunkRecord, FileRecord, Manifest, TensorRecord
from elastictrain.checkpoint.safetensors_format import LENGTH_BYTES, MAX_HEADER_BYTES
from elastictrain.checkpoint.tiling import tiling_problem

MAX_COUNT = 2**63 - 1
"""Of steps, bytes and elements: torch and every file system count in signed 64 bits."""

MAX_DIMS = 64
MAX_CREATED = 253_402_300_799.0
"""The last second of the year 9999: no calendar goes further."""


def check_manifest(manifest: Manifest) -> None:
    """Raises: ValueError naming the part that is wrong, what it must be, and what it is."""
    if not 1 <= manifest.world_size <= MAX_COUNT:
        raise ValueError(f"`world_size` must be from 1 to {MAX_COUNT}, but is {manifest.world_size}")
    if not 0 <= manifest.step <= MAX_COUNT:
        raise ValueError(f"`step` must be from 0 to {MAX_COUNT}, but is {manifest.step}")
    if not 0 <= manifest.created <= MAX_CREATED:
        raise ValueError(f"`created` must be a time in seconds before the year 10000, but is {manifest.created}")
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files):
        raise ValueError("two files have the same name")
    for file in manifest.files:
        _check_file(file)
    for name, tensor in manifest.tensors.items():
        _check_extent(name, tensor)
        for chunk in tensor.chunks:
            _check_place(name, tensor, chunk, files.get(chunk.file))
        problem = tiling_problem(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
        if problem is not None:
            raise ValueError(f"tensor {name!r}: its chunks {problem}")
    counters_of(manifest.state, step=manifest.step)


def _check_file(file: FileRecord) -> None:
    if file.size_bytes > MAX_COUNT:
        raise ValueError(f"{file.name} must have at most {MAX_COUNT} bytes, but has {file.size_bytes}")
    most = min(file.size_bytes, LENGTH_BYTES + MAX_HEADER_BYTES)
    if not LENGTH_BYTES <= file.header_bytes <= most:
        raise ValueError(f"{file.name} must have a header of {LENGTH_BYTES} to {most} bytes, but it has {file.header_bytes}")


def _check_extent(name: str, tensor: TensorRecord) -> None:
    element = BY_NAME.get(tensor.dtype)
    if element is None:
        raise ValueError(f"tensor {name!r} has the unknown element type {tensor.dtype!r}")
    if len(tensor.shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} must have at most {MAX_DIMS} dimensions, but has {len(tensor.shape)}")
    # A dimension of 0 would hide the others, which torch multiplies all the same.
    if math.prod(max(1, size) for size in tensor.shape) * element.size_bytes > MAX_COUNT:
        raise ValueError(f"tensor {name!r} must have at most {MAX_COUNT} bytes, but has the shape {list(tensor.shape)}")


def _check_place(name: str, tensor: TensorRecord, chunk: ChunkRecord, file: FileRecord | None) -> None:
    # Before any product: thousands of dimensions have one that takes hours.
    if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
        raise ValueError(f"a chunk of tensor {name!r} has another number of dimensions than the tensor")
    if chunk.size_bytes != math.prod(chunk.sizes) * BY_NAME[tensor.dtype].size_bytes:
        raise ValueError(f"a chunk of tensor {name!r} has another number of bytes than its sizes say")
    if file is None or not file.header_bytes <= chunk.start <= chunk.start + chunk.size_bytes <= file.size_bytes:
        raise ValueError(f"a chunk of tensor {name!r} lies outside of the files")
