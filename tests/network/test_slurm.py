"""The job template for Slurm, submitted to a real one: time limit, preemption, nodes that fail, and administrators."""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import durable_step
from slurm_cluster import SlurmCluster, missing_tools
from torchruns import REPOSITORY, TINY, events, last_step, last_wins, wait_until

from elastictrain.chaos.network.hosts import VirtualNetwork
from elastictrain.config.load import load
from elastictrain.data.ledger import check_exactly_once, read_ledger
from elastictrain.data.opening import open_datasets
from elastictrain.storage.opening import open_store

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=missing_tools() or "")

BATCH = 8
ARGUMENTS = (
    *TINY,
    f"train.global_batch={BATCH}",
    "train.steps=100000",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=20",
    "data.ledger=true",
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.05",
    "fault.heartbeat_s=0.2",
    "launch.notices=false",
    "launch.standbys=0",
    "launch.join_s=90",
)
SBATCH = {"nodes": "2", "gpus-per-node": "1", "cpus-per-task": "2", "time": "60"}
PYTHON = {"CPUS ": " 2", "        nodes": "2", "        gpus_per_node": "1", "        timeout_min": "60"}
SET = {
    "slurm.sbatch": {f"#SBATCH --{option}": value for option, value in SBATCH.items()},
    "submitit_job.py": PYTHON,
}


def adapted(name: str, arguments: Sequence[str]) -> str:
    """A template with the lines set that are marked; what it gives to the launcher beside them stays."""
    text = (REPOSITORY / "scripts" / "cluster" / name).read_text()
    for option, value in SET[name].items():
        text, found = re.subn(rf"^({re.escape(option)}=)[^,\n]+?(,? +# <-)", rf"\g<1>{value}\2", text, flags=re.MULTILINE)
        assert found == 1, option
    kept = re.findall(r"^ +\"?((?:launch|fault)\.[a-z_]+=\d+)", text, re.MULTILINE)
    assert [one.partition("=")[0] for one in kept] == ["launch.min_hosts", "fault.notice_s"]
    words = last_wins([*arguments, *kept])
    given = "run=({})".format(" ".join(words)) if name == "slurm.sbatch" else f"RUN = {words}"
    text, found = re.subn(r"^(?:run=\(|RUN = \[)\n.*?^[\])]$", given, text, flags=re.DOTALL | re.MULTILINE)
    assert found == 1
    return text


@dataclass(slots=True)
class Job:
    cluster: SlurmCluster
    run_dir: Path
    number: int
    log: Path

    def go_on(self) -> None:
        """Until a step that nobody has done yet is done."""
        goal = last_step(self.run_dir) + 2
        self._wait(lambda: last_step(self.run_dir) >= goal, f"step {goal}")

    def wait_for(self, state: str, *, restarts: int) -> dict[str, str]:
        def reached() -> bool:
            job = self.cluster.job(self.number)
            return (job["JobState"], job["Restarts"]) == (state, str(restarts))

        self._wait(reached, f"{state} after {restarts} restarts")
        return self.cluster.job(self.number)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, timeout_s=180, what=what)
        except AssertionError as error:
            log = self.log.read_text()[-8000:] if self.log.exists() else "it has not begun"
            raise AssertionError(f"{error}\n{self.cluster.job(self.number)}\n{log}") from None

    def limit(self, minutes: str) -> None:
        """Set the time limit. The lead of the template's signal is 5: then Slurm sends it when it looks next."""
        self.cluster.command("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def stopped_at(self) -> int:
        """The step that all hosts saved when they last stopped together: the newest that was done."""
        stop = events(self.run_dir, "stop")[-1]
        assert (stop["exit_code"], stop["saved"], stop["step"]) == (75, "storage", last_step(self.run_dir))
        step: int = stop["step"]
        return step

    def resumed_at(self) -> int:
        """The step from which the run went on last, once it does a step of its own."""
        self.go_on()
        step: int = events(self.run_dir, "resume")[-1]["step"]
        return step

    def num_hosts(self) -> int:
        """Of the newest generation."""
        newest = max((self.run_dir / "launch" / "generations").glob("*.json"))
        return len(json.loads(newest.read_text())["members"])


def submit(cluster: SlurmCluster, name: str, folder: Path) -> Job:
    """Submit a template; both train the same run."""
    run_dir, job_folder = folder / "run", folder / f"with-{name}"
    job_folder.mkdir()
    (job_folder / ".venv").symlink_to(sys.prefix)
    given = [*ARGUMENTS, f"run.dir={run_dir}", f"checkpoint.memory_dir={cluster.memory}"]
    (job_folder / name).write_text(adapted(name, given))
    command = ("sbatch", "--parsable") if name == "slurm.sbatch" else (sys.executable,)
    number = int(cluster.command(*command, name, folder=job_folder))
    log = f"llama-{number}.log" if name == "slurm.sbatch" else f"submitit/{number}_0_log.out"
    return Job(cluster, run_dir, number, job_folder / log)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """slurmd makes sockets in its folder, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="et-") as name:
        yield Path(name)


def test_whatever_slurm_does_the_run_goes_on(network: VirtualNetwork, tmp_path: Path, short_path: Path) -> None:
    cluster = SlurmCluster(network, short_path / "slurm")
    job = submit(cluster, "slurm.sbatch", tmp_path)

    # A drained node keeps its job. Another job then takes the other node: the launchers get a signal, save and end.
    job.go_on()
    cluster.set_node("n2", "DRAIN")
    job.go_on()
    assert (job.num_hosts(), cluster.job(job.number)["Restarts"]) == (2, "0")
    urgent = ("sbatch", "--partition=urgent", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.command(*urgent)
    job.wait_for("PENDING", restarts=1)
    saved = job.stopped_at()
    cluster.set_node("n2", "RESUME")
    assert (job.resumed_at(), job.num_hosts()) == (saved, 2)

    # A node that fails is left out, and what is in storage is not done again.
    committed = durable_step(job.run_dir)
    cluster.set_node("n2", "DOWN")
    wait_until(lambda: job.num_hosts() == 1, timeout_s=60, what="a generation of one host")
    assert job.resumed_at() >= committed
    assert cluster.job(job.number)["NodeList"] == "n1"

    # If that is the host of the batch script, and lost, Slurm itself requeues the job.
    cluster.set_node("n2", "RESUME")
    committed = durable_step(job.run_dir)
    cluster.lose("n1")
    job.wait_for("PENDING", restarts=2)
    cluster.restore("n1")
    assert job.resumed_at() >= committed
    assert job.num_hosts() == 2

    # The time limit is near: the launchers get a signal, and the script requeues the job, which is then cancelled.
    job.limit("5")
    job.wait_for("PENDING", restarts=3)
    saved = job.stopped_at()
    cluster.command("scancel", str(job.number))

    # The same run goes on in a job that Python submitted, and an administrator requeues that.
    job = submit(cluster, "submitit_job.py", tmp_path)
    assert (job.resumed_at(), job.num_hosts()) == (saved, 2)
    cluster.command("scontrol", "requeue", str(job.number))
    job.wait_for("PENDING", restarts=1)
    check(job)


def check(job: Job) -> None:
    """Each sample was consumed once, each step's loss is one, and no start began anew."""
    last = job.stopped_at()
    first: dict[int, float] = {}
    for row in events(job.run_dir, "step"):
        assert row["loss"] == pytest.approx(first.setdefault(row["step"], row["loss"]), rel=1e-5)
    assert sorted(first) == list(range(1, last + 1))
    assert [row["step"] for row in events(job.run_dir, "resume")].count(0) == 1
    config = load(last_wins([*ARGUMENTS, "run.dir=unused"]))
    problems = check_exactly_once(
        list(read_ledger(open_store(str(job.run_dir)))),
        steps=last,
        global_batch=BATCH,
        num_samples=len(open_datasets(config.data, seq_len=config.train.seq_len).train),
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    assert problems == ()
