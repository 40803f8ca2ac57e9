"""The loop that chaos compares with: DDP under torchrun, with the checkpoints that torch's documentation recommends.

    torchrun ... -m elastictrain.chaos.plain_loop KEY=VALUE ...

It trains the task of the same configuration on the same samples, saves every `checkpoint.every_steps` with DCP, by a rename,
and goes on from the newest checkpoint. It writes the events that a report needs, so that both runs are measured alike.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from elastictrain.config.composed import RunConfig
from elastictrain.config.load import load
from elastictrain.config.task_signature import build_task
from elastictrain.data.opening import open_datasets
from elastictrain.entry_point import leave_process

_START_LIMIT_S = 120.0
_COLLECTIVE_LIMIT_S = 20.0  # instead of half an hour: a host may vanish without a word
_KEPT = 3
_EVERY_STEPS = 50


def main(arguments: Sequence[str]) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=_START_LIMIT_S))
    torch.set_num_threads(1)
    _Loop(load(arguments)).train()
    return 0


class _Loop:
    def __init__(self, config: RunConfig) -> None:
        self._config, self._folder = config, Path(config.run.dir)
        task: Any = build_task(config)
        self._task = task
        torch.manual_seed(config.run.seed)
        self._group = dist.new_group(timeout=timedelta(seconds=_COLLECTIVE_LIMIT_S))
        self._model = DistributedDataParallel(task.build_model(), process_group=self._group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=config.optim.lr)
        self._data = open_datasets(config.data, seq_len=config.train.seq_len).train
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def train(self) -> None:
        """To the last step."""
        batch, asked = self._config.train.global_batch, self._config.checkpoint.every_steps
        every_steps = _EVERY_STEPS if asked == "auto" else asked or _EVERY_STEPS
        with self._journal() as write:
            step = self._resume()
            write("resume", step=step, tier="storage" if step else "none")
            while step < self._config.train.steps:
                began_s, loss = time.monotonic(), self._step(step * batch)
                step += 1
                rate = batch / (time.monotonic() - began_s)
                write("step", step=step, loss=loss, samples_per_s=rate, positions=[(step - 1) * batch, step * batch])
                if step % every_steps == 0:
                    saved_s = time.monotonic()
                    self._save(step)
                    seconds = {"total": time.monotonic() - saved_s}
                    write("checkpoint_saved", step=step, reason="interval", bytes=0, seconds=seconds)

    def _step(self, position: int) -> float:
        """One update; every rank has the same number of passes."""
        size, ranks = int(self._config.train.micro_batch), self._world
        passes = -(-self._config.train.global_batch // (size * ranks))
        total = torch.zeros(())
        for index in range(passes):
            first = position + (index * ranks + self._rank) * size
            rows = [self._data[number % len(self._data)] for number in range(first, first + size)]
            inputs: Any = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            with nullcontext() if index == passes - 1 else self._model.no_sync():
                output = self._task.loss(self._model, inputs)
                loss = output.loss_sum / output.weight / passes
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _checkpoints(self) -> list[Path]:
        return sorted(self._folder.glob("checkpoints/step-?????????"))

    def _save(self, step: int) -> None:
        target = self._folder / "checkpoints" / f"step-{step:09d}"
        unfinished = target.with_suffix(".tmp")
        if self._rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(self._group)
        dcp.save(self._state(), checkpoint_id=unfinished, process_group=self._group)
        if self._rank == 0:
            unfinished.rename(target)
            for old in self._checkpoints()[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier(self._group)

    def _resume(self) -> int:
        """Load the newest checkpoint, as rank 0 sees it; returns its step."""
        found = [str(self._checkpoints()[-1]) if self._checkpoints() else ""]
        dist.broadcast_object_list(found, group=self._group)
        if not found[0]:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=found[0], process_group=self._group)
        options = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **options)
        return int(found[0].rpartition("-")[2])

    @contextmanager
    def _journal(self) -> Iterator[Any]:
        """Events of this start, which begins when the process did; only rank 0 writes."""
        if self._rank:
            yield lambda event, **fields: None
            return
        events = self._folder / "events"
        events.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name[:6]) for path in events.glob("??????-*.jsonl")), default=0)
        name = f"{number:06d}-{os.getpid():08x}"
        with (events / f"{name}-r00000.jsonl").open("a", buffering=1) as file:

            def write(event: str, **fields: object) -> None:
                row = {"time": time.time(), "event": event, "incarnation": name, "rank": 0, **fields}
                file.write(json.dumps(row) + "\n")

            write("start", world_size=self._world, hosts=[], device="cpu", seconds={})
            yield write


if __name__ == "__main__":
    main(sys.argv[1:])
    leave_process(0)
