"""One rank over NCCL that exchanges its groups again and again under a compiled model; test_exchange.py reads what it prints.

python exchange_alone.py KIND group|lone EXCHANGES
"""

import json
import sys
import threading
from pathlib import Path

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed.group import lone_group, make_group
from elastictrain.distributed.reattach import detach, forget_step, reattach
from elastictrain.distributed.wrapping import MeshShape, Wrapping
from elastictrain.identity import Identity
from elastictrain.train.parameters import local
from elastictrain.train.parked_memory import ParkedMemory

WIDTH, STEPS = 1024, 3
ALONE = Identity(0, 1, 0, 1, "here", launched=True)
DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fall(nn.functional.silu(self.rise(self.norm(x))))
        return out


def main(kind: str, first: str, exchanges: int) -> None:
    wrapping = Wrapping(
        MeshShape(1, 1),
        ParallelGroup(kind=kind),  # type: ignore[arg-type]
        TrainGroup(steps=1, global_batch=1, micro_batch=1, precision="bf16", compile=True),
        DEVICE,
    )
    stores = dist.HashStore()

    def meet(generation: int) -> None:
        store = dist.PrefixStore(str(generation), stores)
        make_group(store, ALONE, backend="nccl", init_timeout_s=60.0, save_timeout_s=60.0)

    lone_group(ALONE, backend="nccl", on_gpu=True) if first == "lone" else meet(0)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(DEVICE)
    wrapped = wrapping.finish(wrapping.wrap(model, list(model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def forward(step: int) -> Tensor:
        batch = torch.randn(4, 256, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        with wrapped.precision_context():
            loss: Tensor = wrapped.module(batch).float().square().mean()
        return loss

    def train(first_step: int) -> list[float]:
        losses = []
        for step in range(first_step, first_step + STEPS):
            loss = forward(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            figure = loss.detach().clone()
            dist.all_reduce(figure)
            losses.append(figure.item())
        return losses

    def tensors() -> list[Tensor]:
        parameters = list(model.parameters())
        return [local(one) for one in parameters] + [local(one) for key in parameters for one in optimizer.state[key].values()]

    train(0)
    if first == "lone":
        detach(10.0)
        forget_step(wrapped)
        before = torch.cuda.memory_allocated()
        parked = ParkedMemory.give(tensors(), peak_bytes=0)
        # DDP keeps its buckets, which are as large as the parameters.
        assert torch.cuda.memory_allocated() < before / 2
        parked.take()
        with torch.no_grad():
            for one in tensors():
                one.zero_()
            for number, one in enumerate(model.parameters()):
                local(one).normal_(generator=torch.Generator(DEVICE).manual_seed(number))
        meet(0)
        wrapped = reattach(wrapping, wrapped)
    copies = [one.detach().clone() for one in tensors()]
    wanted = train(STEPS)
    for number in range(1, exchanges + 1):
        # The step is cut short while its work is under way on the device.
        dist.all_reduce(torch.ones(1 << 24, device=DEVICE))
        forward(99).backward() if number % 2 else forward(99)
        aborting = threading.Thread(target=detach, args=(10.0,))
        aborting.start()
        aborting.join()
        forget_step(wrapped)
        meet(number)
        wrapped = reattach(wrapping, wrapped)
        with torch.no_grad():
            for one, copy in zip(tensors(), copies, strict=True):
                one.copy_(copy)
        found = train(STEPS)
        figures = {
            "equal": found == wanted,
            "graphs": sum(torch._dynamo.utils.counters["stats"].values()),
            "memory": torch.cuda.memory_allocated(),
            "free": torch.cuda.mem_get_info()[0],
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
