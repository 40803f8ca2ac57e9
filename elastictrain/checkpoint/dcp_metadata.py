"""Manifest to DCP metadata and back: the planner of torch.distributed.checkpoint reshards by it."""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata

from elastictrain.checkpoint.manifest import Manifest
from elastictrain.checkpoint.tensor_bytes import dtype_named


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
