"""What a checkpoint costs: ours against stock torch.distributed.checkpoint (DCP), interleaved, under training of a real Llama.

    python scripts/bench_checkpoint.py                                                      (a world of one)
    torchrun --standalone --nproc-per-node 2 scripts/bench_checkpoint.py --model tiny
    torchrun --standalone --nproc-per-node 8 scripts/bench_checkpoint.py --model 1b --disk /data --json table.json

The loop trains as `elastictrain.run` does (FSDP on several ranks). In each round every method in turn saves once and loads what
it saved, with undisturbed steps before; the first round warms up, the others give the medians of the table:

in the call     how long the call that begins the save keeps the loop
stall           how much longer than undisturbed ones all steps took, from the call until the save is durable; this has the call
                in it, and what a save in the background takes from the step
durable         from the call until the checkpoint is complete in storage

Stock DCP is given what it needs to do well: gloo groups of its own, and for `async_save` a stager that keeps its buffers, if it
can (pinned on CUDA, shared with the process), and copies while the next step runs; whether what it copies is the state of one
step is its own affair. Files are read back as they are, warm. Further arguments KEY=VALUE are those of elastictrain.run.
Nothing is left in `--disk` or in host memory.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from checkpoint_methods import Bench, FailedError, Method, methods_of

from elastictrain.checkpoint.exchange import gather_json
from elastictrain.config.load import load
from elastictrain.data.assignment import Share
from elastictrain.entry_point import leave_process
from elastictrain.errors import EXIT_BUG, EXIT_OK, ElasticTrainError
from elastictrain.identity import Identity, read_identity
from elastictrain.liveness.progress import ProgressTracker
from elastictrain.run import complain
from elastictrain.train.bringup import claim_memory, form_group, meet
from elastictrain.train.build import build
from elastictrain.train.checks import check_alone
from elastictrain.train.snapshot_memory import start_saver
from elastictrain.train.snapshot_saving import SnapshotSaving
from elastictrain.train.step import PendingStep

QUIET_STEPS = 6
SMALL = ("model.dim=384", "model.num_layers=6", "model.num_heads=6", "model.ffn_dim=1024")
MODELS: dict[str, tuple[str, ...]] = {
    "tiny": ("recipe=llama_tiny", "train.seq_len=64", "train.micro_batch=1"),
    "small": ("recipe=llama_tiny", *SMALL, "train.seq_len=32", "train.micro_batch=1"),
    "1b": ("recipe=llama_fsdp",),
}


class Training:
    """The steps of the loop, one at a time: launched, and the one before it finished, as in `elastictrain.train.loop`."""

    def __init__(self, bench: Bench) -> None:
        self._loop = bench.loop
        train = bench.config.train
        share = Share(train.global_batch, train.micro_batch, bench.identity.world_size, bench.identity.rank)
        self._passes = share.passes_per_step
        self._rate = bench.config.optim.lr
        self._pending: PendingStep | None = None
        self._finished_s = time.monotonic()
        self._first = True

    def step(self) -> float:
        """Seconds since a step was finished before."""
        loop = self._loop
        step = loop.state.step + 1
        launched = loop.stepper.run(
            step, loop.loader, passes=self._passes, rate=self._rate, flags=lambda: loop.saving.flags(step)
        )
        loop.state.step = step
        if self._pending is not None:
            self._finish(self._pending)
        self._pending = launched
        loop.saving.snapshot(step, reason=None)
        if self._first:
            self._first = False
            loop.saving.first_step_done()
        now = time.monotonic()
        taken_s, self._finished_s = now - self._finished_s, now
        return taken_s

    def _finish(self, pending: PendingStep) -> None:
        result = pending.result()
        self._loop.saving.step_finished(result.step)
        self._loop.saving.on_flags(result.step, result.flags)


@dataclass(frozen=True, slots=True)
class Sample:
    """One save or load. `bytes` counts the files."""

    bytes: int
    durable_s: float
    call_s: float | None = None
    stall_s: float | None = None


class Interleaving:
    """Rounds of all methods; what fails on any rank is left out from then on."""

    def __init__(self, bench: Bench, methods: list[Method]) -> None:
        self.bench = bench
        self.methods = methods
        self.training = Training(bench)
        self.samples: dict[str, list[Sample]] = {}
        self.failed: dict[str, str] = {}
        self.quiet: list[float] = []

    def run(self, rounds: int) -> None:
        self._warm_up()
        for number in range(rounds + 1):
            for method in self.methods:
                if method.name in self.failed:
                    continue
                try:
                    found = self._save_and_load(method, loads=number > 0)
                except FailedError as error:
                    self.failed[method.name] = f"failed at save {number + 1}: {error}"
                    continue
                for name, sample in found.items():
                    # The first save makes groups, buffers and processes.
                    self.samples.setdefault(name, [])
                    if number > 0:
                        self.samples[name].append(sample)

    def _warm_up(self) -> None:
        """Until slots for snapshots are there, or clearly do not come."""
        saving = self.bench.loop.saving
        deadline = time.monotonic() + self.bench.limit_s
        ready = not isinstance(saving, SnapshotSaving)
        for number in itertools.count():
            self.training.step()
            # All say so, or one has no patience left: then its first save says what is wrong.
            ready = ready or not all(saving.flags(0).busy)
            told = gather_json([ready, time.monotonic() > deadline], group=self.bench.group)
            if number >= 2 * QUIET_STEPS and (all(row[0] for row in told) or any(row[1] for row in told)):
                return

    def _save_and_load(self, method: Method, *, loads: bool) -> dict[str, Sample]:
        quiet = [self._step() for _ in range(QUIET_STEPS + 2)][2:]
        self.quiet += quiet
        usual_s = statistics.median(quiet)
        began = time.monotonic()
        error = ""
        try:
            method.begin(self.bench.loop.state.step)
        except Exception as exception:  # noqa: BLE001  # whatever it is, the other methods go on
            error = tell(exception)
        call_s, stall_s = time.monotonic() - began, 0.0
        durable_s: float | None = None
        while durable_s is None:
            stall_s += self._step() - usual_s
            durable_s = self._agree(method, began, error)
        # What was launched before the end is settled one step later.
        stall_s += self._step() - usual_s
        calls = gather_json(call_s, group=self.bench.group)
        size_bytes = bytes_in(method.path()) if self.bench.identity.is_log_rank else 0
        found = {method.name: Sample(size_bytes, durable_s, max(map(float, calls)), stall_s)}
        for name, load_one in method.loads().items() if loads else ():
            found[name] = Sample(size_bytes, self._load(load_one))
        dist.barrier(group=self.bench.group)
        if self.bench.identity.is_log_rank:
            method.clear()
        return found

    def _step(self) -> float:
        seconds = self.training.step()
        # Also in undisturbed steps: it is one of the ways in which ranks wait for each other.
        gather_json(0, group=self.bench.group)
        return seconds

    def _agree(self, method: Method, began: float, error: str) -> float | None:
        """Seconds until all ranks were through; None as long as one is not. Raises: FailedError on all ranks alike."""
        durable: float | None = None
        if not error:
            try:
                durable = method.durable_at()
            except BaseException as exception:  # noqa: BLE001  # as above
                error = tell(exception)
        if not error and durable is None and time.monotonic() - began > self.bench.limit_s:
            error = f"not durable within {self.bench.limit_s:g} s"
        seconds = None if durable is None else max(0.0, durable - began)
        told = gather_json([error, seconds], group=self.bench.group)
        if errors := [row[0] for row in told if row[0]]:
            raise FailedError(errors[0])
        return None if any(row[1] is None for row in told) else max(row[1] for row in told)

    def _load(self, act: Callable[[], None]) -> float:
        self.bench.synchronize()
        dist.barrier(group=self.bench.group)
        began = time.monotonic()
        error = ""
        try:
            act()
        except Exception as exception:  # noqa: BLE001  # as above
            error = tell(exception)
        self.bench.synchronize()
        errors = [one for one in gather_json(error, group=self.bench.group) if one]
        if errors:
            raise FailedError(errors[0])
        return time.monotonic() - began


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def tell(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return (text if isinstance(error, FailedError) else f"{type(error).__name__}: {text}")[:160]


def medians(result: Interleaving) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    remarks = {method.name: method.remark for method in result.methods} | result.failed
    for name in dict.fromkeys((*remarks, *result.samples)):
        samples = result.samples.get(name, [])
        row: dict[str, object] = {"method": name, "rounds": len(samples), "remark": remarks.get(name, "")}
        for column in ("bytes", "call_s", "stall_s", "durable_s"):
            values = [getattr(sample, column) for sample in samples]
            row[column] = statistics.median(values) if values and None not in values else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    heading = ["method", "GB", "in the call s", "stall s", "durable s", "GB/s", "rounds", "remark"]
    lines = [heading]
    for row in rows:
        size_bytes, durable_s = row["bytes"], row["durable_s"]
        rate = size_bytes / durable_s / 1e9 if isinstance(size_bytes, int | float) and isinstance(durable_s, float) else None
        gb = size_bytes / 1e9 if isinstance(size_bytes, int | float) else None
        figures = [gb, row["call_s"], row["stall_s"], durable_s, rate]
        texts = ["-" if value is None else f"{value:.3f}" for value in figures]
        lines.append([str(row["method"]), *texts, str(row["rounds"]), str(row["remark"])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if place in (0, len(line) - 1) else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def report(bench: Bench, result: Interleaving, options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if bench.cuda else f"CPU, {bench.config.run.num_threads} thread(s) a rank"
    parameters = sum(parameter.numel() for parameter in bench.loop.state.model.parameters())
    step_ms = 1e3 * statistics.median(result.quiet)
    rows = medians(result)
    print(f"{bench.identity.world_size} x {device}, torch {torch.__version__}, Llama of {parameters / 1e6:.1f} M parameters")
    print(f"undisturbed step {step_ms:.1f} ms; medians of {options.rounds} rounds; files in {options.disk}")
    print(table(rows), flush=True)
    if options.json:
        facts = {"world": bench.identity.world_size, "device": device, "torch": torch.__version__, "step_ms": step_ms}
        samples = {name: [asdict(sample) for sample in found] for name, found in result.samples.items()}
        Path(options.json).write_text(json.dumps({**facts, "rows": rows, "samples": samples}, indent=1))


def bring_all_up(options: argparse.Namespace, overrides: list[str], identity: Identity, folder: Path) -> Bench:
    world = identity.world_size
    model = options.model or ("1b" if torch.cuda.is_available() else "small")
    usual = (
        f"parallel={'fsdp' if world > 1 else 'ddp'}",
        "data=stdlib",
        "data.holdout_samples=0",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
    )
    fixed = (
        f"run.dir={folder}/run",
        "train.steps=1000000",
        "train.eval_every_steps=0",
        "checkpoint.every_steps=0",
        "checkpoint.snapshot_every_steps=0",
        "checkpoint.keep_last=1",
        "checkpoint.max_failed_saves=1000",
        "telemetry.loggers=[]",
        "telemetry.progress=off",
    )
    # What a person gives replaces what is usual here, and contradicts what is fixed.
    given = {argument.partition("=")[0] for argument in overrides}
    kept = [argument for argument in (*MODELS[model], *usual) if argument.partition("=")[0] not in given]
    # As many samples as one pass of all ranks takes.
    micro_batch = load([*kept, *overrides, *fixed]).train.micro_batch
    config = load([*kept, *overrides, *fixed, f"train.global_batch={world * micro_batch}"])
    torch.set_num_threads(config.run.num_threads)
    context = check_alone(config, identity, tracker=ProgressTracker(), stop_request=lambda: None)
    claim_memory(context)
    meet(context)
    form_group(context)
    agent = os.getppid() if identity.launched else os.getpid()
    loop = build(context, start_saver(context, agent=agent))
    return Bench(context, loop, folder, options.limit)


def end(folder: Path, code: int) -> NoReturn:
    """Leave, and leave nothing; a saver that is still there ends by itself when this process is gone, and its run's folder."""
    for child in multiprocessing.active_children():
        child.kill()
    # Made when tensors are shared with a process, and removed only by an interpreter that ends in the usual way.
    shutil.rmtree(get_temp_dir(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    leave_process(code)


def main() -> None:
    parser = argparse.ArgumentParser(description="What checkpoints cost: ours and stock DCP, interleaved.")
    parser.add_argument("--model", choices=tuple(MODELS), help="1b on CUDA devices, small (10 M parameters) on the CPU")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for checkpoints, the same on all ranks")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one save")
    parser.add_argument("--total", type=float, default=1200.0, help="seconds for everything")
    parser.add_argument("--json", metavar="FILE", help="write medians and samples there, too")
    options, overrides = parser.parse_known_args()
    if not Path(options.disk).is_dir():
        parser.error(f"--disk must be a folder, but is {options.disk}")
    warnings.filterwarnings("ignore")
    identity = read_identity(os.environ)
    # All ranks must name the same folder; the agent's id is what they share.
    folder = Path(options.disk) / f"elastictrain-bench-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

    results: list[Interleaving] = []

    def out_of_time() -> None:
        print(f"rank {identity.rank}: not done within {options.total:g} s", file=sys.stderr, flush=True)
        for begun in results if identity.is_log_rank else ():
            report(begun.bench, begun, options)
        end(folder, EXIT_BUG)

    timer = threading.Timer(options.total, out_of_time)
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGTERM, lambda *_: end(folder, 143))
    code = EXIT_OK
    try:
        bench = bring_all_up(options, overrides, identity, folder)
        result = Interleaving(bench, list(methods_of(bench)))
        results.append(result)
        result.run(options.rounds)
        if identity.is_log_rank:
            report(bench, result, options)
        bench.loop.close(finished=True)
        bench.context.heartbeats.close()
        bench.context.journal.close()
        # The groups are not taken down: one whose save failed may never answer.
        dist.barrier(group=bench.group)
    except ElasticTrainError as error:
        code = complain(error, identity)
    except BaseException:  # noqa: BLE001  # threads of what failed may wait for each other for ever: nothing may wait for them
        traceback.print_exc()
        code = EXIT_BUG
    end(folder, code)


if __name__ == "__main__":
    main()
