"""Whole runs whose folder and data are in a bucket: killed, damaged, disturbed, cut off."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torchruns import TINY, Run, alone, environment, events, kill, losses, torchrun, train_warm

from elastictrain.data.ledger import check_exactly_once, read_ledger
from elastictrain.storage.store import Store
from tests.process.s3.faultproxy import Answer, DropAnswer, DropRequest, Fault, FaultProxy, Request, Stall, seeded
from tests.process.s3.server import S3Server, bring, environment_for

pytestmark = pytest.mark.s3

STEPS, BATCH = 40, 8
ARGUMENTS = (
    # The workers themselves save here; what savers do with a store is tested beside this.
    "checkpoint.buffers=0",
    *TINY,
    f"train.steps={STEPS}",
    "train.eval_every_steps=0",
    "data=tokens",
    "data.ledger=true",
    "checkpoint.every_steps=5",
    "fault.heartbeat_s=0.2",
)
FAULTS: tuple[Fault, ...] = (
    Answer(503, "SlowDown"),
    Answer(500, "InternalError"),
    Answer(400, "RequestTimeout"),
    Stall(0.5),
    DropRequest(1000),
    DropAnswer(),
    DropAnswer(10),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    return file


def prepare(text: Path, *, out: str, endpoint: str) -> None:
    command = [sys.executable, "-m", "elastictrain.data", "prepare", str(text), "--out", out, "--shard-tokens", "20000"]
    subprocess.run(command, env=environment(environment_for(endpoint)), timeout=60, check=True, capture_output=True)


@pytest.fixture(scope="module")
def tokens(text: Path, s3_server: S3Server) -> str:
    """Token files in the bucket."""
    url = f"{s3_server.bucket_url}/tokens"
    prepare(text, out=url, endpoint=s3_server.endpoint)
    return url


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run with everything on local disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(text, out=f"{folder}/tokens", endpoint="http://127.0.0.1:1")
    found = losses(train_warm([*ARGUMENTS, f"data.path={folder}/tokens"], world_size=2, folder=folder))
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def ledger_problems(store: Store, *, steps: int) -> tuple[str, ...]:
    rows = list(read_ledger(store))
    num_samples = 1 + max(sample for row in rows for sample in row.samples)
    return check_exactly_once(rows, steps=steps, global_batch=BATCH, num_samples=num_samples, seed=0, shuffle=True)


def arguments_for(store: Store, *, tokens: str, folder: Path) -> tuple[str, ...]:
    return (*ARGUMENTS, f"run.dir={store.url}", f"data.path={tokens}", f"data.cache_dir={folder}/cache")


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill which rank, what becomes of the request, and where the next start must go on."""

    name: str
    method: str
    target: str
    """Pattern; its first group, if it has one, is the step of the checkpoint in question."""
    rank: int
    fault: Fault | None
    lead: int | None
    """Steps from that checkpoint to the one where the next start goes on; None: it depends."""
    committed: bool = False
    """Only once this incarnation has sent a manifest."""


MOMENTS = (
    Moment("between saves", "PUT", r"/events/.*r00000\.part-00001", 1, None, None, committed=True),
    Moment("a file", "PUT", r"/step-(\d+)[^/]*/[^/]*-r00001-.*safetensors", 1, DropRequest(1000), -5),
    Moment("before the manifest", "PUT", r"/step-(\d+)[^/]*/manifest\.json", 0, DropRequest(0), -5),
    Moment("reading the manifest back", "GET", r"/step-(\d+)[^/]*/manifest\.json", 0, DropAnswer(), 0, committed=True),
    Moment("retention", "DELETE", r"/step-(\d+)[^/]*/.*safetensors", 0, DropRequest(0), 10, committed=True),
)


@dataclass(slots=True)
class Killer:
    """A plan that kills one worker per incarnation."""

    moments: list[Moment]
    run: Run | None = None
    incarnation: str = ""
    committing: str = ""
    """The incarnation that sent a manifest last."""
    done: dict[str, tuple[Moment, int]] = field(default_factory=dict)

    def __call__(self, request: Request) -> Fault | None:
        if found := re.search(r"/events/(\d+-[0-9a-f]+)-r", request.target):
            self.incarnation = found[1]
        # What survivors still send before they notice must not fall to the next moment.
        if not self.moments or self.run is None or self.incarnation in ("", *self.done):
            return None
        moment = self.moments[0]
        found = re.search(moment.target, request.target)
        if request.method != moment.method or not found or (moment.committed and self.committing != self.incarnation):
            if request.method == "PUT" and "/manifest.json" in request.target:
                self.committing = self.incarnation
            return None
        self.moments.pop(0)
        self.done[self.incarnation] = (moment, int(found[1]) if found.groups() else 0)
        kill(self.run.workers()[moment.rank])
        return moment.fault


def test_sigkill_between_and_during_saves(
    store: Store, tokens: str, s3_proxy: FaultProxy, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    killer = Killer(list(MOMENTS))
    s3_proxy.follow(killer)
    with torchrun(
        [*arguments_for(store, tokens=tokens, folder=tmp_path), "checkpoint.keep_last=2"],
        world_size=2,
        folder=tmp_path,
        max_restarts=len(MOMENTS),
        extra_environment=environment_for(s3_proxy.endpoint),
    ) as run:
        killer.run = run
        assert run.wait(240) == 0, run.output()[-6000:]
    assert not killer.moments, f"never killed at: {killer.moments}"
    run_dir = bring(store, tmp_path / "copy")
    assert losses(run_dir) == undisturbed
    resumes = events(run_dir, "resume")
    for (moment, step), resume in zip(killer.done.values(), resumes[1:], strict=True):
        assert moment.lead is None or resume["step"] == step + moment.lead, (moment, step, resume)
    assert ledger_problems(store, steps=STEPS) == ()
    kept = {info.key.split("/")[1] for info in store.list("checkpoints") if info.key.endswith("manifest.json")}
    assert len(kept) == 2


def test_faults_on_the_way(
    store: Store, tokens: str, s3_proxy: FaultProxy, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    disturbing = seeded(3, share=0.2, faults=FAULTS)
    killer = Killer([Moment("after a save", "GET", r"/step-000000020/manifest\.json", 0, None, None, committed=True)])
    s3_proxy.follow(lambda request: killer(request) or disturbing(request))
    with torchrun(
        arguments_for(store, tokens=tokens, folder=tmp_path),
        world_size=2,
        folder=tmp_path,
        max_restarts=1,
        extra_environment=environment_for(s3_proxy.endpoint),
    ) as run:
        killer.run = run
        assert run.wait(240) == 0, run.output()[-6000:]
    run_dir = bring(store, tmp_path / "copy")
    assert losses(run_dir) == undisturbed
    assert [row["step"] for row in events(run_dir, "resume")] == [0, 20]
    assert not events(run_dir, "checkpoint_failed")
    assert not events(run_dir, "checkpoint_rejected")
    broken = {(request.method, type(fault)) for request, fault in s3_proxy.broken}
    assert {method for method, _ in broken} >= {"GET", "PUT"}
    assert {kind for _, kind in broken} == {Answer, Stall, DropRequest, DropAnswer}
    assert ledger_problems(store, steps=STEPS) == ()
    assert "trying again" in run.output()


def test_damaged_checkpoints_are_passed_over_by_name(store: Store, tokens: str, s3_server: S3Server, tmp_path: Path) -> None:
    arguments = (*arguments_for(store, tokens=tokens, folder=tmp_path), "train.steps=20", "checkpoint.keep_last=4")
    code, output = alone(arguments, folder=tmp_path)
    assert code == 0, output
    files = [info.key for info in store.list("checkpoints")]

    def shard(step: int) -> str:
        return next(key for key in files if f"step-{step:09d}/" in key and key.endswith(".safetensors"))

    data = bytearray(store.read(shard(20)))
    data[-5] ^= 1
    store.write(shard(20), bytes(data))
    store.delete(shard(15))
    store.delete("checkpoints/step-000000010/manifest.json")
    code, output = alone(arguments, folder=tmp_path)
    assert code == 0, output
    run_dir = bring(store, tmp_path / "copy")
    rejected = {row["checkpoint"]: row for row in events(run_dir, "checkpoint_rejected")}
    assert rejected["step-000000020"]["file"] == shard(20).rpartition("/")[2]
    assert rejected["step-000000015"]["file"] == shard(15).rpartition("/")[2]
    assert rejected["step-000000010"]["file"] == "manifest.json"
    assert all(name in output for name in rejected), output
    assert [row["step"] for row in events(run_dir, "resume")] == [0, 5]
    # `losses` compares each step with its repetition.
    assert sorted(losses(run_dir)) == list(range(1, 21))
    assert len(events(run_dir, "step")) == 35


@pytest.mark.parametrize("all_of_it", [False, True], ids=["checkpoints", "bucket"])
def test_bucket_that_refuses(all_of_it: bool, store: Store, tokens: str, s3_proxy: FaultProxy, tmp_path: Path) -> None:
    refused = Answer(403, "AccessDenied")
    committed: list[Request] = []

    def checkpoints(request: Request) -> Fault | None:
        """Saves fail, but for that at step 10."""
        is_save = request.method == "PUT" and "/checkpoints/step-" in request.target
        return refused if is_save and "step-000000010" not in request.target else None

    def everything(request: Request) -> Fault | None:
        """All requests fail once the manifest of step 10 is sent."""
        if committed:
            return refused
        if request.method == "PUT" and "step-000000010/manifest" in request.target:
            committed.append(request)
        return None

    s3_proxy.follow(everything if all_of_it else checkpoints)
    code, output = alone(
        (*arguments_for(store, tokens=tokens, folder=tmp_path), "checkpoint.max_failed_saves=2"),
        folder=tmp_path,
        timeout_s=60,
        extra_environment=environment_for(s3_proxy.endpoint),
    )
    assert code == 74, output
    assert "Traceback" not in output
    assert "2 checkpoints in a row could not be saved (`checkpoint.max_failed_saves` is 2)" in output
    assert re.search(rf"the last reason: .*{store.url}/checkpoints/.*check that this user, or the credentials", output), output
    if not all_of_it:
        run_dir = bring(store, tmp_path / "copy")
        assert [(row["step"], row["in_a_row"]) for row in events(run_dir, "checkpoint_failed")] == [(5, 1), (15, 1), (20, 2)]
        assert [row["exit_code"] for row in events(run_dir, "failure")] == [74]
        assert sorted(losses(run_dir)) == list(range(1, 21))
        return
    s3_proxy.follow(lambda _: None)
    code, output = alone(
        arguments_for(store, tokens=tokens, folder=tmp_path),
        folder=tmp_path,
        extra_environment=environment_for(s3_proxy.endpoint),
    )
    assert code == 0, output
    run_dir = bring(store, tmp_path / "copy")
    assert [row["step"] for row in events(run_dir, "resume")] == [0, 10]
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
