"""One rank of a test: restores what another world saved, compares tensor by tensor, and saves again.

Usage: reshard_worker.py fsdp|hsdp|ddp|single RUN_DIR STEP
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.config.composed import CheckpointGroup
from elastictrain.storage.opening import open_store


def build(kind: str, world_size: int) -> tuple[nn.Module, nn.Module]:
    """The bare model, for names, and what is called. Sizes that 2, 3 and 4 do not divide, and fewer rows than ranks."""
    model = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    if kind == "ddp":
        return model, DistributedDataParallel(model)
    if kind in ("fsdp", "hsdp"):
        shape = (2, world_size // 2) if kind == "hsdp" else (world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
        for layer in (model[1], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, model


def state_of(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Flat names to live tensors."""
    tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors


def train(called: nn.Module, optimizer: torch.optim.AdamW, *, steps: int, rank: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        called((torch.arange(5) + step + rank) % 11).square().sum().backward()
        optimizer.step()


def main(kind: str, run_dir: str, step: int) -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    group = None
    if kind != "single":
        dist.init_process_group("gloo")
        group = dist.new_group(backend="gloo")
    torch.manual_seed(step)
    model, called = build(kind, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(called, optimizer, steps=2, rank=rank)
    tensors = state_of(model, optimizer)
    events: list[object] = []
    checkpointer = Checkpointer(
        open_store(run_dir),
        options=CheckpointGroup(shard_mb=0.0005, manifest_mb=0.0 if kind in ("fsdp", "single") else 4.0),
        group=group,
        rank=rank,
        world_size=world_size,
        incarnation=f"inc{step}",
        config_digest="c",
        record=events.append,
    )
    result = checkpointer.restore(tensors=tensors, reset=lambda: None)
    if result is None:
        assert step == 1
        train(called, optimizer, steps=1, rank=rank)
    full = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in state_of(model, optimizer).items()
    }
    reference = Path(run_dir) / "reference.pt"
    if result is None:
        if rank == 0:
            torch.save(full, reference)
    else:
        assert result.step == step - 1
        assert result.state == {"step": step - 1}
        expected = torch.load(reference)
        assert expected.keys() == full.keys()
        for name in expected:
            assert torch.equal(expected[name], full[name]), name
    saved = checkpointer.save(step, tensors=tensors, state={"step": step}, reason="step")
    num_events = len(events)
    # No rank begins another collective on its own: all are told the same.
    again = checkpointer.save(step, tensors=tensors, state={"step": step}, reason="end")
    assert (again, len(events)) == (saved, num_events)
    assert bool(events) == (rank == 0)
    if rank == 0:
        sys.stdout.write(json.dumps({"kind": kind, "world_size": world_size, "tensors": len(full)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # gloo may abort when the interpreter ends.
    sys.stdout.flush()
    os._exit(0)
