"""Damages a run folder in many ways and checks that a start and every command still behave.

    python scripts/fuzz_run_folder.py --cases 4000 --seed 1 --jobs 2

A small run is trained by the launcher (two workers, sharded). Each case copies its folder, applies one to three seeded
mutations, and then runs `checkpoint verify --all`, a start that trains on to a fixed step, and one of `ls`, `prune` and
`export` on it, each in a process of its own. A case holds if

- every command ends with a known exit code, a word that says why, and no traceback;
- a start refuses, or trains the very losses of an undisturbed start from the same checkpoint;
- a start rejects nothing that `verify` called valid;
- nothing beside the run is opened, changed or deleted: an audit hook sees each call, and a folder with files that nobody may
  read is compared, times of access included;
- nothing that is named in the folder is imported, and neither time nor memory grows.

Prints a line for each case that fails, with its seed, and a summary. Exit code: 0 if all hold, 1 otherwise.
`--only SEED` repeats one case and keeps its folder.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_mutations import MOST_BYTES, MUTATIONS

from elastictrain.checkpoint.manifest_format import encode_manifest
from elastictrain.checkpoint.reader import ManifestReader

SIZES = (
    "recipe=llama_tiny",
    "preflight=off",
    "run.on_change=continue",
    "parallel=fsdp",
    "parallel.backend=gloo",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_dim=64",
    "train.seq_len=32",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.eval_every_steps=0",
    "train.compile=false",
    "optim.warmup_steps=2",
    "telemetry.loggers=[]",
    "telemetry.log_every_steps=1000",
    "checkpoint.buffers=0",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=3",
    "checkpoint.manifest_mb=0",
)
SAVED = (5, 10, 15)
WITHOUT_PARTS = 10
LAST = 17
CASE_S = 60.0
MEMORY_BYTES = 2 * 2**30
"""Address space that a command may take beyond what it has after its imports."""

SECRET = "what-only-the-environment-holds"
KNOWN_CODES = {0, 64, 69, 74, 75, 78}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command did."""

    command: str
    code: int
    """Exit code; minus the signal if it was killed; `-SIGALRM` for one that hung."""

    output: str
    outside: tuple[str, ...]
    """Calls of the audit hook on paths outside of the folder."""

    seconds: float
    peak_bytes: int


@dataclass(slots=True)
class Case:
    """One damaged folder and what became of it."""

    seed: int
    applied: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resumed: int | None = None


class Fuzzer:
    """Makes the folder once, and runs cases on copies of it. `work` is a folder of this process alone."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._pristine = work / "pristine"
        self._reference: dict[int, dict[int, float]] = {}

    def prepare(self) -> None:
        """Train the run, and from each of its checkpoints the losses that a start must reproduce."""
        command = [sys.executable, "-m", "elastictrain.launch", *SIZES, "launch.processes=2"]
        run = [*command, f"train.steps={SAVED[-1]}", f"run.dir={self._pristine}"]
        subprocess.run(run, check=True, capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
        join_parts(self._pristine / "checkpoints" / f"step-{WITHOUT_PARTS:09d}")
        for step in SAVED:
            folder = self._work / f"reference-{step}" / "run"
            shutil.copytree(self._pristine, folder)
            for later in SAVED:
                if later > step:
                    shutil.rmtree(folder / "checkpoints" / f"step-{later:09d}")
            outcome = run_forked("start", folder)
            losses = read_losses(folder)
            if outcome.code or sorted(losses) != list(range(step + 1, LAST + 1)):
                raise SystemExit(f"the undisturbed start from step {step} failed:\n{outcome.output}")
            self._reference[step] = losses

    def run(self, seed: int, *, keep: bool = False) -> Case:
        """Apply the mutations of `seed` and check everything."""
        case = Case(seed)
        base = self._work / f"case-{seed}"
        folder, outside = base / "run", base / "outside"
        shutil.copytree(self._pristine, folder)
        make_outside(outside)
        rng = random.Random(seed)
        for mutation in rng.choices(MUTATIONS, k=rng.choice((1, 1, 2, 3))):
            with suppress(OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
                # A mutation whose object an earlier one has taken away has nothing to do.
                mutation.apply(rng, folder, outside)
                case.applied.append(mutation.name)
        before = fingerprint(outside)
        for command in ("verify", "start", rng.choice(("ls", "prune", "export"))):
            case.outcomes.append(run_forked(command, folder))
        case.problems += self._judge(case, folder)
        after = fingerprint(outside)
        if before != after:
            case.problems.append(f"the folder beside the run changed: {sorted(before.items() ^ after.items())}")
        if not keep:
            shutil.rmtree(base)
        return case

    def _judge(self, case: Case, folder: Path) -> list[str]:
        problems = []
        for outcome in case.outcomes:
            where = f"{outcome.command} ended with {outcome.code}"
            if outcome.code not in KNOWN_CODES:
                problems.append(f"{where}: {outcome.output[-2000:]}")
            if "Traceback" in outcome.output:
                problems.append(f"{where} and a traceback: {outcome.output[-2000:]}")
            if outcome.code and "elastictrain" not in outcome.output:
                problems.append(f"{where} without a word")
            if SECRET in outcome.output:
                problems.append(f"{where} and printed what the environment holds")
            if outcome.outside:
                problems.append(f"{where} and reached outside: {outcome.outside[:5]}")
        return problems + self._judge_start(case, folder)

    def _judge_start(self, case: Case, folder: Path) -> list[str]:
        by_name = {outcome.command: outcome for outcome in case.outcomes}
        start, verify = by_name["start"], by_name["verify"]
        if start.code:
            return []
        case.resumed, losses = read_resumed(folder), read_losses(folder)
        if case.resumed not in self._reference:
            return [f"the start went on from step {case.resumed}"]
        expected = self._reference[case.resumed]
        problems = []
        if any(losses.get(step) != loss for step, loss in expected.items()):
            problems.append(f"other losses after step {case.resumed}: {losses} instead of {expected}")
        if verify.code == 0 and rejected_folders(folder):
            problems.append(f"verify found all valid, and the start rejected {rejected_folders(folder)}")
        return problems


def join_parts(checkpoint: Path) -> None:
    """As if the manifest had never had any."""
    manifest = ManifestReader.at(str(checkpoint)).manifest
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    for path in checkpoint.glob("*-part.json"):
        path.unlink()


def make_outside(outside: Path) -> None:
    """Files that nothing may touch, and a module that nothing may import."""
    (outside / "step-000000099").mkdir(parents=True)
    for name in ("precious.txt", "manifest.json", "000001-0-r00000-000.safetensors", "step-000000099/manifest.json"):
        (outside / name).write_bytes(b'{"precious": true}\n' * 20)
    modules = outside.parent / "modules"
    modules.mkdir()
    (modules / "fuzz_evil.py").write_text(f"open({str(outside / 'imported')!r}, 'w').close()\n")
    for path in [outside, *outside.rglob("*")]:
        # With a time of access before that of change, the next read moves it, also under `relatime`.
        os.utime(path, (0, path.stat().st_mtime))


def fingerprint(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each file with its times of access and change, and its content. The time of access is as it was before."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        facts = path.stat()
        found[str(path.relative_to(folder))] = (facts.st_atime_ns, facts.st_mtime_ns, path.read_bytes())
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    return found


def new_events(folder: Path) -> list[dict[str, object]]:
    """Events of the newest incarnation, by the order of file names, which a start of a world of one wrote."""
    files = [
        path for path in (folder / "events").glob("*-r00000.jsonl") if path.is_file() and path.lstat().st_size < MOST_BYTES
    ]
    fresh = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
    rows = []
    for line in fresh.read_bytes().splitlines() if fresh is not None else []:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def read_losses(folder: Path) -> dict[int, float]:
    """Step -> loss of the newest start."""
    return {int(str(row["step"])): float(str(row["loss"])) for row in new_events(folder) if row.get("event") == "step"}


def read_resumed(folder: Path) -> int | None:
    """The step that the newest start went on from."""
    found = [row for row in new_events(folder) if row.get("event") == "resume"]
    return int(str(found[-1]["step"])) if found else None


def rejected_folders(folder: Path) -> list[str]:
    """Committed checkpoints that the newest start rejected. What has no manifest is none, and `verify` says nothing of it."""
    names = [str(row["checkpoint"]) for row in new_events(folder) if row.get("event") == "checkpoint_rejected"]
    manifests = {name: folder / "checkpoints" / name / "manifest.json" for name in names}
    return [name for name, path in manifests.items() if path.is_file() and not path.is_symlink()]


def arguments_of(command: str, folder: Path) -> list[str]:
    """The command line of one of the commands."""
    if command == "start":
        return [*SIZES, f"train.steps={LAST}", f"run.dir={folder}"]
    more = {
        "verify": ["--all"],
        "prune": ["--keep-last", "1", "--yes"],
        "ls": [],
        "export": [f"{folder.parent}/export", "--to", "safetensors"],
    }
    return [command, str(folder), *more[command]]


def run_forked(command: str, folder: Path) -> Outcome:
    """Run one command in a fork of this process, bounded in time and memory."""
    log = folder.parent / f"{command}.log"
    seen = folder.parent / f"{command}.outside"
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _in_fork(command, folder, log=log, seen=seen)
        finally:
            os._exit(code)
    deadline = began + CASE_S
    hung = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline and not hung:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    code = -signal.SIGALRM if hung else os.waitstatus_to_exitcode(status)
    outside = tuple(seen.read_text().splitlines()) if seen.exists() else ()
    output = log.read_bytes().decode(errors="replace") if log.exists() else ""
    return Outcome(command, code, output, outside, time.monotonic() - began, usage.ru_maxrss * 1024)


def _in_fork(command: str, folder: Path, *, log: Path, seen: Path) -> int:
    empty = folder.parent / "empty"
    empty.mkdir(exist_ok=True)
    os.chdir(empty)
    os.environ.update({"TMPDIR": str(empty), "FUZZ_SECRET": SECRET})
    tempfile.tempdir = str(empty)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(folder.parent / "modules"))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    watch_calls(folder.parent / "outside", seen)
    main = import_command(command)
    code = main(arguments_of(command, folder))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def watch_calls(outside: Path, seen: Path) -> None:
    """Write down every audited call with a path below `outside`, through whatever links."""
    names = ("open", "os.", "shutil.", "pathlib.", "import")
    descriptor = os.open(seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    real = os.path.realpath(outside)
    busy = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal busy
        if busy or not event.startswith(names) or (event == "os.listdir" and not arguments):
            return
        busy = True
        try:
            for argument in arguments[:2]:
                if not isinstance(argument, (str, bytes, os.PathLike)):
                    continue
                path = os.fsdecode(argument)
                # The last part of an open that follows no link is the link itself.
                reached = os.path.realpath(path) if _follows(event, arguments) else _parent_resolved(path)
                if reached == real or reached.startswith(f"{real}/"):
                    os.write(descriptor, f"{event} {path}\n".encode())
        except (OSError, ValueError):
            # A path that cannot be resolved leads nowhere.
            pass
        finally:
            busy = False

    sys.addaudithook(hook)


def _follows(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2] if len(arguments) > 2 else 0
        return not (isinstance(flags, int) and flags & os.O_NOFOLLOW)
    return event in ("os.listdir", "os.scandir", "os.chmod", "os.truncate", "os.utime", "os.mkdir")


def _parent_resolved(path: str) -> str:
    head, tail = os.path.split(path.rstrip("/"))
    return f"{os.path.realpath(head)}/{tail}"


def import_command(command: str) -> Callable[[Sequence[str]], int]:
    """The `main` of a command; imported before the fork, so that a case costs no import."""
    if command == "start":
        from elastictrain.run import main

        return main
    from elastictrain.checkpoint.__main__ import main as checkpoint

    return checkpoint


def import_everything() -> None:
    """What the commands import when they run, so that forks share it."""
    import elastictrain.checkpoint.commands.diff
    import elastictrain.checkpoint.commands.export
    import elastictrain.checkpoint.commands.prune
    import elastictrain.checkpoint.commands.survey
    import elastictrain.checkpoint.commands.verify
    import elastictrain.config.load
    import elastictrain.train.worker  # noqa: F401

    for command in ("start", "ls"):
        import_command(command)


def share(seeds: Sequence[int], *, jobs: int, run: Callable[[int], Case]) -> list[Case]:
    """Cases side by side, each process forking its commands from a state in which everything is imported."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(run, seeds))


def report(cases: Sequence[Case]) -> int:
    """Print what failed and a summary; returns the exit code."""
    failed = [case for case in cases if case.problems]
    for case in failed:
        sys.stdout.write(f"FAILED seed {case.seed} ({', '.join(case.applied)}):\n")
        for problem in case.problems:
            sys.stdout.write(f"    {problem}\n")
    starts = [outcome for case in cases for outcome in case.outcomes if outcome.command == "start"]
    resumed = Counter(case.resumed for case in cases if case.resumed is not None)
    refused = Counter(start.code for start in starts if start.code)
    every = [outcome for case in cases for outcome in case.outcomes]
    summary = {
        "cases": len(cases),
        "failed": len(failed),
        "resumed_from": {str(step): count for step, count in sorted(resumed.items())},
        "refused_with": {str(code): count for code, count in sorted(refused.items())},
        "slowest_s": round(max(outcome.seconds for outcome in every), 2),
        "most_memory_mb": max(outcome.peak_bytes for outcome in every) // 2**20,
        "mutations": len(Counter(name for case in cases for name in case.applied)),
    }
    sys.stdout.write(f"{json.dumps(summary)}\n")
    return 1 if failed else 0


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; each has its own (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time (%(default)s)")
    parser.add_argument("--only", type=int, metavar="SEED", help="one case, whose folder is kept")
    parsed = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import_everything()
    work = Path(tempfile.mkdtemp(prefix="elastictrain-fuzz-"))
    try:
        fuzzer = Fuzzer(work)
        fuzzer.prepare()
        if parsed.only is not None:
            case = fuzzer.run(parsed.only, keep=True)
            sys.stdout.write(f"{work}/case-{case.seed}\n")
            return report([case])
        return report(share(range(parsed.seed, parsed.seed + parsed.cases), jobs=parsed.jobs, run=fuzzer.run))
    finally:
        if parsed.only is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
