"""A loop over two streams, each of which has a place of its own on each rank: torchdata's loader, and an iterator of grain."""

import os
import sys
import time
from collections.abc import Iterator

import grain
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elastictrain

EPOCH = 60


class Numbers(IterableDataset[Tensor]):
    """A stream of numbers, which cannot be read from anywhere but its place; each rank has its own ones."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place = rank, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < EPOCH:
            self.place += 1
            yield torch.tensor([float(100 * self.rank + self.place)])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def endless(loader: StatefulDataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


def main(folder: str, steps: int) -> None:
    distributed, rank = "RANK" in os.environ, int(os.environ.get("RANK", "0"))
    options = {"checkpoint": {"every_steps": 10, "memory_dir": f"{folder}-memory"}, "preflight": {"level": "off"}}
    options["telemetry"] = {"flush_s": 0.1}
    if distributed:
        elastictrain.init_process_group(folder, **options)
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(1, 1)
    model = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = StatefulDataLoader(Numbers(rank), batch_size=4, num_workers=1, generator=torch.Generator())
    pictures = grain.MapDataset.range(1000).shuffle(seed=rank).repeat().to_iter_dataset().batch(4)
    drawn = iter(pictures)
    extra = {"loader": elastictrain.PerRank(loader), "pictures": elastictrain.PerRank(drawn)}
    given = {} if distributed else options
    with elastictrain.attach(folder, model=model, optimizer=optimizer, extra=extra, **given) as run:
        first = run.restore() + 1
        for step, numbers in zip(range(first, steps + 1), endless(loader), strict=False):
            pictured = torch.from_numpy(next(drawn)).float().unsqueeze(1)
            loss = model(torch.cat([numbers, pictured])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told = torch.stack([loss.detach(), numbers.sum(), pictured.sum()])
            if distributed:
                torch.distributed.all_reduce(told)
            run.step_done(step, metrics={"loss": told[0], "numbers": told[1], "pictures": told[2]})
            time.sleep(0.03)
            if run.should_stop:
                break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
