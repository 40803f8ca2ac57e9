"""Device memory that a standby gives back until it has a rank."""

from collections.abc import Iterable
from contextlib import suppress
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
        """Get the memory back; where there is much more, also that for a step, in one piece: the first step would ask the
        driver for each part of it. Raises: torch.OutOfMemoryError."""
        for storage, size_bytes in self.storages:
            storage.resize_(size_bytes)
        rest_bytes = self.peak_bytes - sum(size for _, size in self.storages)
        # Other streams than this one have memory of their own, and cannot have a part of a piece that is in use.
        if rest_bytes > 0 and torch.cuda.mem_get_info()[0] >= 2 * rest_bytes:
            with suppress(torch.OutOfMemoryError):
                # The allocator keeps it when it is freed.
                torch.empty(rest_bytes, dtype=torch.uint8, device="cuda")
