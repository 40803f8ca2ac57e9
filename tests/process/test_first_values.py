"""A model that begins again after a state that was damaged, on two ranks of this file's `main`."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchruns import warm_ranks

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.data.dataset import Batch
from elastictrain.distributed.wrapping import Wrapped, Wrapping, mesh_shape, share_copies
from elastictrain.train.parameters import build_model, fill_again
from elastictrain.train.task import LossOutput

CPU = torch.device("cpu")
TRAIN = TrainGroup(steps=1, global_batch=2, micro_batch=1)
Kind = Literal["ddp", "fsdp"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("table", torch.rand(3))


class Drawing:
    """Leaves initialisation to the modules."""

    def build_model(self) -> nn.Module:
        return Net()

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        raise NotImplementedError


class DrawingApart(Drawing):
    """Each rank draws its own, which DDP hides: it begins with the values of rank 0."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return Net()


def test_it_has_its_first_values_on_every_rank(tmp_path: Path) -> None:
    assert "alike" in warm_ranks([__file__], world_size=2, folder=tmp_path, timeout_s=120)


def wrapped_for(kind: Kind, task: Drawing) -> Wrapped:
    shape = mesh_shape(ParallelGroup(kind=kind), world_size=2, local_world_size=2)
    wrapping = Wrapping(shape, ParallelGroup(kind=kind), TRAIN, CPU)
    return wrapping.finish(wrapping.wrap(build_model(task, seed=3, device=CPU), ()))


def values(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found.items()}


def check(kind: Kind, task: Drawing) -> None:
    wrapped = wrapped_for(kind, task)
    first = values(wrapped.bare)
    with torch.no_grad():
        for tensor in (*wrapped.bare.parameters(), *wrapped.bare.buffers()):
            tensor.fill_(7 + dist.get_rank())
    fill_again(wrapped.bare, task, seed=3, device=CPU)
    share_copies(wrapped)
    again = values(wrapped.bare)
    for name, value in first.items():
        assert torch.equal(again[name], value), (kind, name)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check("ddp", DrawingApart())
    check("ddp", Drawing())
    check("fsdp", Drawing())
    dist.barrier()
    sys.stdout.write("alike\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
