"""The group `parallel`: how the model is spread over ranks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """How the model is spread over ranks; it follows whatever world there is."""

    kind: Literal["ddp", "fsdp", "hsdp"]
    """`ddp`: a whole copy per rank. `fsdp`: sharded over all ranks. `hsdp`: sharded within a host, copied across hosts."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """nccl trains on GPUs, and ends with exit code 69 where torch can use none; gloo trains on the CPU; `auto` is nccl where
    torch can use a GPU, else gloo. The recipes that are meant for GPUs say nccl."""

    shard_size: Annotated[int, Range(0)] = 0
    """hsdp: ranks over which one copy is sharded; 0 for the ranks of one host. A world that it does not divide, or a
    size of 1, is sharded whole."""

    reshard_after_forward: bool = True
    """fsdp, hsdp: free a block's gathered parameters after its forward pass and gather them again for the backward pass; false
    trades memory for one gather less."""

    bucket_mb: Annotated[float, Range(0.0, exclusive=True)] = 25.0
    """ddp: size of the gradient buckets that are reduced together (2^20 bytes)."""
