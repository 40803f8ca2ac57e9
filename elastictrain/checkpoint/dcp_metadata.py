"""Manifest to DCP metadata and back: the planner of torch.distributed.checkpoint reshards by it."""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from elastictrain.checkpoint.layout import Item
from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.tensor_bytes import dtype_name, dtype_named
from elastictrain.errors import CheckpointError


def metadata_of(manifest: Manifest) -> Metadata:
    """What DCP's load planners need. Names are flat, so there is no planner data."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_named(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks],
            )
            for name, tensor in manifest.tensors.items()
        }
    )


def item_of(planned: WriteItem) -> Item:
    """What one entry of a save plan writes.

    Raises: CheckpointError if it is not a tensor: other state belongs into the manifest.
    """
    data = planned.tensor_data
    if data is None:
        raise CheckpointError(
            f"{planned.index.fqn!r} is not a tensor; only tensors are written, other state goes to the manifest"
        )
    return Item(
        name=planned.index.fqn,
        dtype=dtype_name(data.properties.dtype),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )
