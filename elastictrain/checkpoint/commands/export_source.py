"""The tensors of a checkpoint as an export wants them: whole, one at a time, in the element type that was asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.commands.selection import Checkpoint
from elastictrain.checkpoint.commands.stored_tensor import read_tensor
from elastictrain.checkpoint.dtypes import BY_NAME
from elastictrain.checkpoint.manifest import JsonValue, Manifest
from elastictrain.checkpoint.tensor_bytes import dtype_name, dtype_named

MODEL = "model."
"""How the names of the model's tensors begin."""


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint. `dtype` is for the model's floating-point tensors; None leaves them as they are stored."""

    checkpoint: Checkpoint
    dtype: torch.dtype | None
    advance: Callable[[int], None]
    """One more tensor is read."""

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint."""
        return self.checkpoint.manifest

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. Raises: DamagedFileError, StorageError."""
        tensor = read_tensor(self.checkpoint.folder, self.manifest.tensors[name])
        self.advance(1)
        return tensor.to(dtype_named(self.dtype_of(name)))

    def dtype_of(self, name: str) -> str:
        """The element type that `read` gives."""
        stored = self.manifest.tensors[name].dtype
        if self.dtype is None or not name.startswith(MODEL) or not dtype_named(stored).is_floating_point:
            return stored
        return dtype_name(self.dtype)

    def size_bytes_of(self, name: str) -> int:
        """Bytes of what `read` gives."""
        return torch.Size(self.manifest.tensors[name].shape).numel() * BY_NAME[self.dtype_of(name)].size_bytes

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(self.size_bytes_of(name) for name in self.manifest.tensors)

    @property
    def facts(self) -> dict[str, JsonValue]:
        """What else there is to know of the checkpoint."""
        manifest = self.manifest
        return {
            "step": manifest.step,
            "world_size": manifest.world_size,
            "config_digest": manifest.config_digest,
            "versions": dict(manifest.versions),
            "state": dict(manifest.state),
        }
