"""Real runs for tests: torchrun with free ports, own folders and bounded waits; only processes started here are ended."""

import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from warm import WarmHost, can_be_warm, warm_host

from elastictrain.chaos.processes import StartedProcess, child_environment, start_process
from elastictrain.chaos.processes import rank_of as rank_of  # noqa: PLC0414
from elastictrain.chaos.processes import savers as savers  # noqa: PLC0414

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = (
    "recipe=llama_tiny",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "train.seq_len=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "telemetry.log_every_steps=1000",
    "telemetry.loggers=[]",
    "optim.warmup_steps=2",
    "preflight=off",
)
"""A model small enough that start-up is what a test takes."""

COMPILED = (
    "train.compile=true",
    "task._target_=tests.process.compiling.CompilingLlama",
    "task.compile_loss=false",
)
"""The same, with so little to compile that a compiler needs seconds."""


environment = child_environment


def last_wins(command: Sequence[str | Path]) -> list[str]:
    """A command without the overrides that a later one of the same key replaces: the program itself refuses both."""
    keys = [key[0] if (key := re.match(r"[a-z_]+[a-z_.]*(?==)", str(argument))) else "" for argument in command]
    return [str(one) for place, one in enumerate(command) if not keys[place] or keys[place] not in keys[place + 1 :]]


def memory_arguments(arguments: Sequence[str], folder: Path) -> list[str]:
    """A host memory of the test's own, the same for all starts below one folder; a `recipe=` must be there to take it."""
    asks = any(argument.startswith(("--", "checkpoint.memory_dir=")) for argument in arguments)
    if asks or not any(argument.startswith("recipe=") for argument in arguments):
        return []
    memory = folder.parent / "host-memory"
    memory.mkdir(parents=True, exist_ok=True)
    return [f"checkpoint.memory_dir={memory}"]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rendezvous_arguments(kind: str) -> list[str]:
    """torchrun's arguments for one host: static, standalone or c10d."""
    if kind == "standalone":
        return ["--standalone"]
    port = free_port()
    if kind == "static":
        return ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"run{port}"]


Run = StartedProcess


def host_of_forks(command: Sequence[str], variables: Mapping[str, str]) -> WarmHost:
    """One that has imported what the variable AHEAD names, or what reads the digits."""
    return warm_host(variables.get("AHEAD", "sklearn.datasets" if "recipe=digits_ddp" in command else ""))


@contextmanager
def started(
    command: Sequence[str],
    *,
    log: Path,
    extra_environment: Mapping[str, str] = {},
    cwd: Path | None = None,
    warm: bool = True,
) -> Iterator[Run]:
    """A process that does not outlive the block. If `warm`, a Python program is a fork of one that has imported torch."""
    variables, folder = environment(extra_environment), cwd or log.parent
    command = last_wins(command)
    if warm and can_be_warm(command):
        forks = host_of_forks(command, variables)
        run = Run(forks.start(command[1:], environment=variables, log=log, cwd=folder), log)
    else:
        run = start_process(command, log=log, cwd=folder, environment=variables)
    try:
        yield run
    finally:
        run.kill_tree()
        run.process.wait(60)


@contextmanager
def torchrun(
    arguments: Sequence[str],
    *,
    world_size: int,
    folder: Path,
    rendezvous: str = "standalone",
    max_restarts: int = 0,
    extra_environment: Mapping[str, str] = {},
    module: Sequence[str] = ("-m", "elastictrain.run"),
    warm: bool = True,
) -> Iterator[Run]:
    """torchrun of a training run, its log in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if "elastictrain.run" in module:
        arguments = [*arguments, *memory_arguments(arguments, folder)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world_size),
        "--max-restarts",
        str(max_restarts),
        "--monitor-interval",
        "0.2",
        "--log-dir",
        str(folder / "agent"),
        *rendezvous_arguments(rendezvous),
        *module,
        *arguments,
    ]
    with started(command, log=folder / "log.txt", extra_environment=extra_environment, warm=warm) as run:
        yield run


def train(arguments: Sequence[str], *, world_size: int, folder: Path, timeout_s: float = 240, **options: Any) -> str:
    """Run to the end; returns the output. Fails unless the exit code is 0."""
    with torchrun(arguments, world_size=world_size, folder=folder, **options) as run:
        code = run.wait(timeout_s)
        assert code == 0, run.output()[-6000:]
        return run.output()


def alone(arguments: Sequence[str], *, folder: Path, timeout_s: float = 240, **options: Any) -> tuple[int, str]:
    """`python -m elastictrain.run` without torchrun; returns exit code and output."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "elastictrain.run", *arguments, *memory_arguments(arguments, folder)]
    with started(command, log=folder / f"alone-{time.monotonic_ns()}.txt", **options) as run:
        return run.wait(timeout_s), run.output()


def train_warm(arguments: Sequence[str], *, world_size: int, folder: Path, extra_environment: Mapping[str, str] = {}) -> Path:
    """A training run that nothing happens to, on warm ranks; returns its folder, `folder`/run."""
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"run.dir={folder}/run", *memory_arguments(arguments, folder / "log")]
    program = ["-m", "elastictrain.run", *arguments, *where]
    warm_ranks(program, world_size=world_size, folder=folder, extra_environment=extra_environment)
    return folder / "run"


@contextmanager
def warm_ranks_started(
    program: Sequence[str],
    *,
    world_size: int,
    folder: Path,
    errors: Sequence[str] = (),
    extra_environment: Mapping[str, str] = {},
) -> Iterator[list[Run]]:
    """A program on ranks that are warm forks, with the store in this process: what an agent does is not under test here.

    They share a log, and none outlives the block. `errors` are warnings that raise.
    """
    log, program = folder / "ranks.txt", last_wins(program)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    runs: list[Run] = []
    try:
        for rank in range(world_size):
            variables = environment({**extra_environment, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            host = host_of_forks(program, variables)
            runs.append(Run(host.start(program, environment=variables, log=log, cwd=folder, errors=errors), log))
        yield runs
    finally:
        for run in runs:
            run.kill_tree()
            run.process.wait(60)


def warm_ranks(program: Sequence[str], *, world_size: int, folder: Path, timeout_s: float = 240, **options: Any) -> str:
    """A program on warm ranks to its end; returns what they printed. Fails unless all exit codes are 0."""
    with warm_ranks_started(program, world_size=world_size, folder=folder, **options) as runs:
        deadline = time.monotonic() + timeout_s
        codes = [run.wait(max(0.0, deadline - time.monotonic())) for run in runs]
        assert not any(codes), f"{codes}: {runs[0].output()[-6000:]}"
        return runs[0].output()


def events(run_dir: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Events of a run in reading order."""
    rows = []
    for file in sorted((run_dir / "events").glob("*.jsonl")):
        # The line that is being written is seen when it is whole.
        rows += [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    return [row for row in rows if name is None or row["event"] == name]


def losses(run_dir: Path, event: str = "step") -> dict[int, float]:
    """Loss of each step, or with `event` "eval" of each evaluation; what was repeated must have had the same loss each time."""
    found: dict[int, float] = {}
    for row in events(run_dir, event):
        before = found.setdefault(row["step"], row["loss"])
        assert before == row["loss"], f"step {row['step']}: {before} and then {row['loss']}"
    return found


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 120, what: str = "condition") -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not hold within {timeout_s} s"
        time.sleep(0.02)


def last_step(run_dir: Path) -> int:
    """The newest step in any event file; 0 if there is none yet."""
    files = sorted((run_dir / "events").glob("*r00000.jsonl")) if (run_dir / "events").exists() else []
    newest = 0
    for file in files:
        for line in file.read_text().splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                if row["event"] == "step":
                    newest = max(newest, row["step"])
    return newest


def kill(process: psutil.Process) -> None:
    """SIGKILL, if it still lives."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
