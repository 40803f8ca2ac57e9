"""A small training run whose ranks exchange their process groups when one is killed; test_reattach.py reads what it writes.

    python exchanging.py FOLDER KIND WORLD PRECISION plain|compiled PHASE...

A rank chosen by chance is killed once in each phase. Its successor is a fresh process in turns with a standby that was built
and trained a step on a lone group. FOLDER/disturbed gets a line of JSON per step and exchange of each rank,
FOLDER/reference those of a run in which nobody is killed and nothing of `reattach` is called.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed.float8 import suits
from elastictrain.distributed.group import Group, lone_group, make_group
from elastictrain.distributed.reattach import detach, forget_step, reattach
from elastictrain.distributed.wrapping import MeshShape, Wrapped, Wrapping, accumulation
from elastictrain.errors import TransportError
from elastictrain.identity import Identity
from elastictrain.train.parameters import local
from elastictrain.train.parked_memory import ParkedMemory

WIDTH, BLOCKS, ROWS, PASSES = 16, 3, 4, 2
STEPS_BETWEEN_KILLS = 2
DETACH_S = 2.0


def nothing(_: str) -> None: ...


reached: Callable[[str], None] = nothing
"""Called by each rank when it is in a phase of a step."""


class Marker(torch.autograd.Function):
    """Says when the passes are between two blocks, where others wait for this rank."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        reached("forward")
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        reached("backward")
        return gradients[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fall(nn.functional.silu(self.rise(self.norm(x))))
        return out

    def compile(self, *args: object, **kwargs: object) -> None:
        super().compile(backend="eager")  # what decides on a compilation is the same, and it costs no compiler


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number != BLOCKS - 1 else layer(Marker.apply(x))
        out: Tensor = self.head(x).float().square().sum()
        return out


@dataclass(frozen=True, slots=True)
class Plan:
    folder: Path
    kind: str
    world: int
    precision: str
    compiled: bool
    phases: tuple[str, ...]
    steps: int

    @property
    def wrapping(self) -> Wrapping:
        shape = {"ddp": MeshShape(self.world, 1), "fsdp": MeshShape(1, self.world), "hsdp": MeshShape(self.world // 2, 2)}
        train = TrainGroup(
            steps=1,
            global_batch=1,
            micro_batch=1,
            precision=self.precision,  # type: ignore[arg-type]
            compile=self.compiled,
            activation_checkpointing="full" if self.compiled else "none",
        )
        # Several buckets. The compiler takes none below 1 MB.
        bucket_mb = 1.0 if self.compiled else 0.001
        parallel = ParallelGroup(kind=self.kind, bucket_mb=bucket_mb)  # type: ignore[arg-type]
        return Wrapping(shape[self.kind], parallel, train, torch.device("cpu"))


@dataclass(slots=True)
class Rank:
    plan: Plan
    rank: int
    group: Group
    wrapped: Wrapped
    optimizer: torch.optim.AdamW
    step: int = 0

    def note(self, **fields: object) -> None:
        with (self.plan.folder / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")

    def tensors(self) -> list[Tensor]:
        found = [local(parameter) for parameter in self.wrapped.bare.parameters()]
        for parameter in self.wrapped.bare.parameters():
            found += [local(value) for _, value in sorted(self.optimizer.state[parameter].items())]
        return found

    def copy_path(self, step: int) -> Path:
        return self.plan.folder / f"copy-{self.rank}-{step}"

    def make_state(self) -> None:
        """The optimizer's state, which its first step makes."""
        for parameter in self.wrapped.bare.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def save(self) -> None:
        torch.save([tensor.detach().clone() for tensor in self.tensors()], self.copy_path(self.step).with_suffix(".part"))
        self.copy_path(self.step).with_suffix(".part").rename(self.copy_path(self.step))

    def restore(self, step: int) -> None:
        with torch.no_grad():
            for tensor, copy in zip(self.tensors(), torch.load(self.copy_path(step)), strict=True):
                tensor.copy_(copy)
        self.step = step

    def train_step(self) -> None:
        """Like train/step.py: accumulation, a collective of our own, an update."""
        figures = torch.zeros(2, dtype=torch.float64)
        self.wrapped.float8.renew()
        for index in range(PASSES):
            batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self.step * 100 + self.rank * 10 + index))
            with accumulation(self.wrapped.module, last=index == PASSES - 1):
                with self.wrapped.precision_context():
                    loss = self.wrapped.module(batch)
                figures[0] += loss.detach()
                loss.backward()
        reached("reduce")
        gradients = [local(parameter.grad) for parameter in self.wrapped.bare.parameters() if parameter.grad is not None]
        figures[1] = torch.nn.utils.get_total_norm(gradients).double().square()
        dist.all_reduce(figures)
        reached("control")
        votes = [torch.zeros(1) for _ in range(self.plan.world)]
        dist.all_gather(votes, torch.ones(1), group=self.group.control)
        reached("update")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.note(step=self.step, loss=figures.tolist(), graphs=graphs())


def graphs() -> int:
    return sum(torch._dynamo.utils.counters["stats"].values())


def identity(plan: Plan, rank: int) -> Identity:
    return Identity(rank, plan.world, rank, plan.world, "here", launched=True)


def meet(plan: Plan, rank: int, generation: int, poll: Callable[[], None] = lambda: None) -> Group:
    store = dist.PrefixStore(str(generation), dist.FileStore(str(plan.folder / "store"), -1))
    return make_group(store, identity(plan, rank), backend="gloo", init_timeout_s=30.0, save_timeout_s=30.0, poll=poll)


def build(plan: Plan, rank: int, group: Group) -> Rank:
    torch.manual_seed(0)
    model = Model()
    float8 = [layer for layer in model.layers.modules() if suits(layer)] if plan.precision == "fp8" else ()
    wrapped = plan.wrapping.finish(plan.wrapping.wrap(model, list(model.layers), float8=float8))
    return Rank(plan, rank, group, wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2))


class Orders:
    """What the driver tells a rank: ["die", phase, from step], ["train", up to step], ["end", generation] and, when all of
    it have left it, ["begin", generation, step to go back to]."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.inbox: list[list[Any]] = []
        self.arrived = threading.Condition()
        self.generation, self.ended = 0, -1
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in os.fdopen(self.descriptor):
            order = json.loads(line)
            if order[0] == "end":
                self.ended = order[1]
                began = time.monotonic()
                detach(DETACH_S)
                order += [time.monotonic() - began, time.monotonic()]
            with self.arrived:
                self.inbox.append(order)
                self.arrived.notify()

    def wait_for(self, kind: str) -> list[Any]:
        with self.arrived:
            while not (orders := [one for one in self.inbox if one[0] == kind]):
                self.arrived.wait()
            self.inbox.remove(orders[0])
            return orders[0]

    def poll(self) -> None:
        """Raises: TransportError if the present generation has ended."""
        if self.ended >= self.generation:
            raise TransportError("the generation has ended")

    def wait_for_leave(self, step: int) -> None:
        """Until step `step` may be trained. Raises: TransportError."""
        with self.arrived:
            while not any(one[0] == "train" and step < one[1] for one in self.inbox):
                self.poll()
                self.arrived.wait()

    def must_die(self, phase: str, step: int) -> bool:
        with self.arrived:
            return any(one[0] == "die" and one[1] == phase and step >= one[2] for one in self.inbox)


def leave(mine: Rank, orders: Orders) -> None:
    raised = time.monotonic()
    _, generation, detach_s, detached = orders.wait_for("end")
    forget_step(mine.wrapped.bare)
    mine.note(left=generation, detach_s=detach_s, raised_s=raised - detached)


def join(mine: Rank, orders: Orders) -> None:
    _, generation, step = orders.wait_for("begin")
    orders.generation = generation
    mine.group = meet(mine.plan, mine.rank, generation, orders.poll)
    mine.wrapped = reattach(mine.plan.wrapping, mine.wrapped)
    mine.restore(step)
    mine.note(joined=generation, graphs=graphs(), threads=threads(), files=files())


def threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def first(plan: Plan, rank: int, newcomer: str, orders: Orders) -> Rank:
    """`newcomer`: "" at the start; "cold" is built on the new group; "warm" was built, and has trained a step, on a lone one,
    and has given its memory back meanwhile;
    "dead" dies before it comes to the group."""
    if not newcomer:
        return build(plan, rank, meet(plan, rank, 0))
    if newcomer == "warm":
        mine = build(plan, rank, lone_group(identity(plan, rank), backend="gloo", on_gpu=False))
        mine.train_step()
        mine.note(warm=graphs())
        detach(DETACH_S)
        forget_step(mine.wrapped.bare)
        parked = ParkedMemory.give(mine.tensors(), peak_bytes=0)
        mine.note(held=sum(tensor.untyped_storage().nbytes() for tensor in mine.tensors()))
        parked.take()
        join(mine, orders)
        return mine
    _, generation, step = orders.wait_for("begin")
    orders.generation = generation
    if newcomer == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    mine = build(plan, rank, meet(plan, rank, generation, orders.poll))
    mine.make_state()
    mine.restore(step)
    mine.note(joined=generation, graphs=graphs(), threads=threads(), files=files())
    return mine


def work(plan: Plan, rank: int, descriptor: int, *, newcomer: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    orders = Orders(descriptor)
    mine = first(plan, rank, newcomer, orders)

    def die(phase: str) -> None:
        if orders.must_die(phase, mine.step):
            os.kill(os.getpid(), signal.SIGKILL)

    global reached  # noqa: PLW0603  # the model has no other way to it
    reached = die
    attached = True
    while mine.step < plan.steps:
        failed = False
        try:
            if not attached:
                join(mine, orders)
                attached = True
            orders.wait_for_leave(mine.step)
            mine.train_step()
            mine.save()
        except Exception as error:  # whatever it is: a step was cut short
            if not plan.phases:
                raise
            mine.note(error=repr(error)[:100])
            failed = True
        # Outside of the handler: the exception refers to the frames of the step, and these to the old groups.
        if failed:
            leave(mine, orders)
            attached = False


class Driver:
    """Does what a launcher does: notices the dead, says which generation comes next, and names the step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pids: dict[int, int] = {}
        self.started: list[int] = []
        self.pipes: dict[int, int] = {}
        self.standby = (0, 0)

    def start(self, rank: int, newcomer: str = "") -> tuple[int, int]:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                work(self.plan, rank, reader, newcomer=newcomer)
                code = 0
            except BaseException:  # noqa: BLE001  # the process ends here
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(reader)
        self.started.append(pid)
        return pid, writer

    def run(self) -> int:
        plan, chance = self.plan, random.Random(f"{self.plan.kind} {self.plan.world} {self.plan.precision}")
        for rank in range(plan.world):
            self.pids[rank], self.pipes[rank] = self.start(rank)
        self.tell(["train", STEPS_BETWEEN_KILLS if plan.phases else plan.steps])
        generation = 0
        for number, phase in enumerate(plan.phases, start=1):
            victim, newcomer = chance.randrange(plan.world), ("cold", "warm")[number % 2]
            if newcomer == "warm":
                self.standby = self.start(victim, "warm")
                self.wait_for(victim, f'"pid": {self.standby[0]}, "warm"')
            step = number * STEPS_BETWEEN_KILLS
            os.write(self.pipes[victim], json.dumps(["die", "forward" if phase == "meet" else phase, step]).encode() + b"\n")
            self.tell(["train", step + 1])
            if phase == "meet":
                generation = self.end(victim, generation, self.start(victim, "dead"))
            successor = self.standby if newcomer == "warm" else self.start(victim, "cold")
            generation = self.end(victim, generation, successor)
            for rank in self.pids:
                self.wait_for(rank, f'"joined": {generation},')
            self.tell(["train", plan.steps if number == len(plan.phases) else step + STEPS_BETWEEN_KILLS])
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids.values()]
        return max(map(abs, codes))

    def tell(self, order: list[object], ranks: Iterable[int] | None = None) -> None:
        for rank in self.pids if ranks is None else ranks:
            os.write(self.pipes[rank], json.dumps(order).encode() + b"\n")

    def lines(self, rank: int) -> list[str]:
        path = self.plan.folder / f"rank-{rank}.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def newest_copy(self) -> int:
        """The newest step of which every rank has a copy."""
        steps = [
            {int(path.name.split("-")[2]) for path in self.plan.folder.glob(f"copy-{rank}-*[0-9]")}
            for rank in range(self.plan.world)
        ]
        return max(set.intersection(*steps), default=0)

    def end(self, victim: int, generation: int, successor: tuple[int, int]) -> int:
        """Wait for the victim's end, have the others leave the generation, and begin the next one, whose number is returned."""
        os.waitpid(self.pids[victim], 0)
        survivors = [rank for rank in self.pids if rank != victim]
        self.tell(["end", generation], survivors)
        for rank in survivors:
            self.wait_for(rank, f'"left": {generation},')
        self.pids[victim], self.pipes[victim] = successor
        self.tell(["begin", generation + 1, self.newest_copy()])
        return generation + 1

    def wait_for(self, rank: int, text: str) -> None:
        deadline = time.monotonic() + 40.0
        while not any(text in line for line in self.lines(rank)):
            if time.monotonic() > deadline:
                os.kill(self.pids[rank], signal.SIGUSR1)
                time.sleep(1.0)
                raise TimeoutError(f"rank {rank}")
            time.sleep(0.005)


def main() -> int:
    folder, kind, world, precision, compiled, *phases = sys.argv[1:]
    for name, chosen in (("reference", ()), ("disturbed", tuple(phases))):
        place = Path(folder) / name
        place.mkdir(parents=True)
        steps = STEPS_BETWEEN_KILLS * (len(phases) + 1)
        driver = Driver(Plan(place, kind, int(world), precision, compiled == "compiled", chosen, steps))
        try:
            if code := driver.run():
                return code
        finally:
            for pid in driver.started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
