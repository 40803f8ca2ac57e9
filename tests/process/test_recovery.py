"""Workers die, hang, and die again while the others recover: the run is that of undisturbed workers, and survivors live on."""

import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torchruns import (
    COMPILED,
    TINY,
    Run,
    events,
    kill,
    last_step,
    losses,
    memory_arguments,
    rank_of,
    started,
    train_warm,
    wait_until,
)

from elastictrain.data.ledger import fold, read_ledger
from elastictrain.storage.opening import open_store
from scripts.recovery_report import Outcome, Row, Strike, judge, ledger_differences, new_step

STEPS, STRIKE_AT, BATCH = 40, 12, 8
ARGUMENTS = (
    *TINY,
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=10",
    "data.ledger=true",
    "fault.heartbeat_s=0.2",
    "launch.poll_s=0.2",
    "launch.lost_s=2",
    "launch.backoff_s=0.1",
    "launch.notices=false",
    "task._target_=tests.process.paced.PacedLlama",
)
SLOW = ("task.pause_s=0.03",)
SOON_S = 15.0
STANDBY = "standby"
MOST_REPEATED = 8  # a snapshot every 4 steps, and the newest one may not be whole on all ranks
EVAL_EVERY = 5


@dataclass(frozen=True, slots=True)
class Case:
    workers: int = 3
    parallel: str = "ddp"
    victims: int = 1  # at once
    again_s: float | None = None  # when the next ones are killed
    number: int = signal.SIGKILL
    before: Callable[[Run], None] = lambda _: None
    arguments: tuple[str, ...] = ()
    training: tuple[str, ...] = ()  # arguments that the undisturbed run has, too


Readers = Mapping[int, list[int]]  # pids of the data workers of each rank


@dataclass(frozen=True, slots=True)
class Recovered:
    case: Case
    run_dir: Path
    code: int
    output: str
    rows: list[Row]  # of rank 0, by time
    outcomes: list[Outcome]
    readers: tuple[Readers, Readers]  # before the first strike, and after the recovery


def family(run: Run) -> list[psutil.Process]:
    """What the launcher has started, and lives."""
    found = []
    assert run.process.poll() is None, run.output()[-3000:]
    for one in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def standbys(run: Run) -> list[psutil.Process]:
    found = []
    for one in family(run):
        with suppress(psutil.NoSuchProcess):
            if one.name() == STANDBY:
                found.append(one)
    return found


def kill_standby(run: Run) -> None:
    """Kill one that waits for a rank, or prepares."""
    wait_until(lambda: bool(standbys(run)), timeout_s=SOON_S, what="a standby")
    for one in standbys(run):
        kill(one)


def await_evaluation(run: Run) -> None:
    """Return when the ranks evaluate, unless this process is late."""
    step = STRIKE_AT - STRIKE_AT % EVAL_EVERY + EVAL_EVERY
    wait_until(lambda: last_step(run.log.parent / "run") >= step, timeout_s=SOON_S, what=f"step {step}")


# Two workers under DDP are those of tests/process/test_launch.py, too; under FSDP those that are killed in an evaluation.
CASES = {
    "ddp, 3 workers": Case(3),
    "fsdp, 3 workers": Case(3, "fsdp"),
    "two workers at once": Case(victims=2),
    "another worker 0.2 s later": Case(again_s=0.2),
    "a worker that is stopped": Case(
        number=signal.SIGSTOP, arguments=("fault.hang_floor_s=1", "fault.step_timeout_s=40", "fault.hang_multiple=3")
    ),
    "a standby, and then a worker": Case(2, before=kill_standby),
    "a worker, without standbys": Case(arguments=("launch.standbys=0",)),
    "hsdp, 4 workers": Case(4, "hsdp", training=("parallel.shard_size=2",)),
    "fsdp, bf16, data workers, in an evaluation": Case(
        2,
        "fsdp",
        before=await_evaluation,
        arguments=("data.workers=1", "task.pause_s=0.02"),
        training=("train.precision=bf16", f"train.eval_every_steps={EVAL_EVERY}", "train.eval_samples=16"),
    ),
    "ddp, bf16, compiled": Case(
        # The pause is part of the task, whose compiled code the undisturbed run uses, too.
        2,
        arguments=("launch.standbys=0",),
        training=("train.precision=bf16", "task.pause_s=0.02", *COMPILED),
    ),
}


def living(run: Run) -> dict[int, psutil.Process]:
    """Workers that live, by rank; the younger one where a rank has had two."""
    found = []
    for one in family(run):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if (rank := rank_of(one)) is not None and rank >= 0:
                found.append((one.create_time(), rank, one))
    return {rank: one for _, rank, one in sorted(found, key=lambda entry: entry[0])}


def readers(run: Run) -> Readers:
    found: dict[int, list[int]] = {}
    for rank, worker in living(run).items():
        for one in worker.children():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(one.cmdline()):
                    found.setdefault(rank, []).append(one.pid)
    return found


def strike(run: Run, case: Case, chance: random.Random) -> Strike:
    workers = living(run)
    ranks = tuple(chance.sample(sorted(workers), case.victims))
    for rank in ranks:
        workers[rank].send_signal(case.number)
    return Strike(time=time.time(), ranks=ranks, pids={rank: one.pid for rank, one in workers.items()})


def rows_of(run_dir: Path) -> list[Row]:
    return sorted((row for row in events(run_dir) if row["rank"] == 0), key=lambda row: float(row["time"]))


def disturb(case: Case, folder: Path, host: Path, *, seed: int) -> Recovered:
    """Train with one disturbance, to the end."""
    run_dir, chance = folder / "run", random.Random(seed)
    arguments = [
        *ARGUMENTS,
        *SLOW,
        f"parallel={case.parallel}",
        *case.training,
        *case.arguments,
        f"launch.processes={case.workers}",
    ]
    arguments += [f"run.dir={run_dir}", *memory_arguments(arguments, folder / "log.txt")]
    command = [sys.executable, "-m", "elastictrain.launch", *arguments]
    with started(command, log=folder / "log.txt", extra_environment={"TMPDIR": str(host)}) as run:
        wait_until(
            lambda: last_step(run_dir) >= STRIKE_AT or run.process.poll() is not None, timeout_s=60, what=f"step {STRIKE_AT}"
        )
        assert run.process.poll() is None, run.output()[-3000:]
        read_before = readers(run)
        case.before(run)
        strikes = [strike(run, case, chance)]
        if case.again_s is not None:
            time.sleep(case.again_s)
            wait_until(lambda: bool(living(run)), timeout_s=SOON_S, what="a worker")
            strikes.append(strike(run, case, chance))
        wait_until(lambda: new_step(rows_of(run_dir), strikes[-1].time) is not None, timeout_s=60, what="a new step")
        pids, read_after = {rank: one.pid for rank, one in living(run).items()}, readers(run)
        code = run.wait(90)
        output = run.output()
    rows, struck = rows_of(run_dir), {rank for one in strikes for rank in one.ranks}
    outcomes = [judge(one, rows, pids=pids, struck_too=struck) for one in strikes]
    return Recovered(case, run_dir, code, output, rows, outcomes, (read_before, read_after))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Temporary files of all runs, among them compiled code."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "graphs").mkdir()
    return folder


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Callable[[str], Recovered]:
    """The run of a case, made when it is first asked for."""
    made: dict[str, Recovered] = {}

    def find(name: str) -> Recovered:
        if name not in made:
            made[name] = disturb(CASES[name], tmp_path_factory.mktemp("disturbed"), host, seed=len(name))
        return made[name]

    return find


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, host: Path) -> Callable[[Case], Path]:
    """The folder of a run that nothing happened to, on as many workers."""
    made: dict[tuple[str, int, tuple[str, ...]], Path] = {}

    def find(case: Case) -> Path:
        key = case.parallel, case.workers, case.training
        if key not in made:
            made[key] = train_warm(
                [*ARGUMENTS, f"parallel={case.parallel}", *case.training],
                world_size=case.workers,
                folder=tmp_path_factory.mktemp("undisturbed"),
                extra_environment={"TMPDIR": str(host)},
            )
        return made[key]

    return find


@pytest.mark.parametrize("name", CASES)
def test_the_run_is_the_same(name: str, recovered: Callable[[str], Recovered], undisturbed: Callable[[Case], Path]) -> None:
    found = recovered(name)
    right = undisturbed(found.case)
    assert found.code == 0, found.output[-6000:]
    assert losses(found.run_dir) == losses(right)
    assert losses(found.run_dir, "eval") == losses(right, "eval")
    ledgers = [fold(list(read_ledger(open_store(str(path))))) for path in (found.run_dir, right)]
    assert ledger_differences(ledgers[0], ledgers[1], steps=STEPS, batch=BATCH) == []


@pytest.mark.parametrize("name", CASES)
def test_survivors_keep_their_processes(name: str, recovered: Callable[[str], Recovered]) -> None:
    found = recovered(name)
    assert [one.rung for one in found.outcomes] == ["in_place"] * len(found.outcomes), found.output[-6000:]
    assert all(one.survivors_kept == one.survivors for one in found.outcomes)
    # Only those that were killed are new.
    assert found.outcomes[0].survivors == found.case.workers - len({r for one in found.outcomes for r in one.strike.ranks})
    assert len(events(found.run_dir, "recovery")) <= len(found.outcomes)
    assert max(one.steps_repeated for one in found.outcomes) <= MOST_REPEATED


def test_survivors_keep_their_data_workers(recovered: Callable[[str], Recovered]) -> None:
    found = recovered("fsdp, bf16, data workers, in an evaluation")
    before, after = found.readers
    ((struck,),) = (one.strike.ranks for one in found.outcomes)
    assert (
        {rank: len(pids) for rank, pids in before.items()} == {rank: len(pids) for rank, pids in after.items()} == {0: 1, 1: 1}
    )
    assert before[1 - struck] == after[1 - struck]
    assert before[struck] != after[struck]


def test_compiled_code_is_kept(recovered: Callable[[str], Recovered], host: Path) -> None:
    found = recovered("ddp, bf16, compiled")
    processes = {pid for told in events(found.run_dir, "start") for pid in told["pids"].values()}
    # After each of its passes each process has written how many graphs it has compiled.
    graphs = {pid: set((host / "graphs" / str(pid)).read_text().split()) for pid in processes}
    assert list(graphs.values()) == [{"1"}] * 3
    # Rank 0 records what its first step has compiled; here it is the victim, so its successor does, too.
    assert found.outcomes[0].strike.ranks == (0,)
    first, later = events(found.run_dir, "compiled")
    assert first["new_files"] > 0
    assert (later["found_files"], later["new_files"]) == (first["new_files"], 0)


def test_the_event_tells_what_happened(recovered: Callable[[str], Recovered]) -> None:
    found = recovered("ddp, 3 workers")
    (told,), (outcome,) = events(found.run_dir, "recovery"), found.outcomes
    (rank,) = outcome.strike.ranks
    assert [name.partition(" on ")[0] for name in told["lost"]] == [f"rank {rank}"]
    assert (told["rung"], told["world_size"], sorted(told["pids"])) == ("in_place", 3, ["0", "1", "2"])
    assert {pid for pid in told["pids"].values() if pid in outcome.strike.pids.values()} == {
        pid for other, pid in outcome.strike.pids.items() if other != rank
    }
    # Rank 0 writes a row for each step that it has finished. Another rank may have finished one more.
    seen = judge(outcome.strike, [row for row in found.rows if row["event"] != "recovery"], pids={})
    assert seen.steps_repeated <= told["steps_repeated"] <= seen.steps_repeated + 1
    assert seen.first_step_s is not None
    assert 0 < told["seconds"]["total"] <= seen.first_step_s + 0.1
    assert all(0 <= seconds <= told["seconds"]["total"] for seconds in told["seconds"].values())


def test_starts_tell_their_processes(recovered: Callable[[str], Recovered]) -> None:
    found = recovered("ddp, 3 workers")
    first = events(found.run_dir, "start")[0]
    assert {int(rank): pid for rank, pid in first["pids"].items()} == dict(found.outcomes[0].strike.pids)


def test_descriptors_and_threads_do_not_grow_with_recoveries(tmp_path: Path) -> None:
    run_dir, chance = tmp_path / "run", random.Random(2)
    arguments = [*ARGUMENTS, *SLOW, "launch.processes=2", f"run.dir={run_dir}"]
    arguments += memory_arguments(arguments, tmp_path / "log.txt")
    used: list[tuple[int, int]] = []
    with started([sys.executable, "-m", "elastictrain.launch", *arguments], log=tmp_path / "log.txt") as run:
        launcher = psutil.Process(run.process.pid)
        for step in (6, 12, 18, 24):
            wait_until(lambda least=step: last_step(run_dir) >= least, timeout_s=60, what=f"step {step}")  # type: ignore[misc]
            counts = []
            for _ in range(3):  # a thread of the recovery before may still end
                time.sleep(0.1)
                counts.append((launcher.num_fds(), launcher.num_threads()))
            used.append(min(counts))
            strike(run, Case(2), chance)
        assert run.wait(90) == 0, run.output()[-3000:]
    # The first recovery may open what stays.
    assert all(later <= earlier + 1 for earlier, later in zip(used[1], used[-1], strict=True)), used
