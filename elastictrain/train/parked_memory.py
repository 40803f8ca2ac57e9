"""Device memory that a standby gives back until it has a rank."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from elastictrain.checkpoint.tensor_bytes import local_part


@dataclass(frozen=True, slots=True)
class ParkedMemory:
    """Tensors keep their storages, which have no memory until `take`; the values are lost."""

    storages: tuple[tuple[torch.UntypedStorage, int], ...]  # with their sizes in bytes
    peak_bytes: int  # of the device, that this process needs for a step

    @classmethod
    def give(cls, tensors: Iterable[Tensor], *, peak_bytes: int) -> "ParkedMemory":
        """Free the storages of this rank's parts of `tensors`, each once, and give their memory back to the device."""
        found: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for tensor in tensors:
            storage = local_part(tensor.detach()).untyped_storage()
            # Tensors may share one.
            if storage.nbytes():
                found[storage.data_ptr()] = storage, storage.nbytes()
        for storage, _ in found.values():
            storage.resize_(0)
        torch.cuda.empty_cache()
        return cls(tuple(found.values()), peak_bytes)

    def take(self) -> None:
        """Raises: torch.OutOfMemoryError."""
        for storage, size_bytes in self.storages:
            storage.resize_(size_bytes)
