"""Two runs in one folder of a bucket."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchruns import TINY, Run, last_wins, memory_arguments, started, wait_until

from elastictrain.errors import ObjectNotFoundError
from elastictrain.storage.store import Store
from tests.process.s3.server import S3Server, environment_for

pytestmark = pytest.mark.s3

ARGUMENTS = (
    *TINY,
    "train.steps=100000",
    "optim.schedule=constant",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=5",
    "telemetry.flush_s=0.5",
    "task._target_=tests.process.paced.PacedLlama",
    "task.pause_s=0.05",
)


@contextmanager
def lone(store: Store, *arguments: str, endpoint: str, folder: Path) -> Iterator[Run]:
    folder.mkdir(parents=True)
    given = [*ARGUMENTS, *arguments, f"run.dir={store.url}"]
    command = last_wins([sys.executable, "-m", "elastictrain.run", *given, *memory_arguments(given, folder)])
    with started(command, log=folder / "log.txt", extra_environment=environment_for(endpoint)) as run:
        yield run


def committed_by(store: Store) -> dict[int, int]:
    """The generation of the incarnation that committed each step."""
    found = {}
    for info in list(store.list("checkpoints")):
        if info.key.endswith("manifest.json"):
            try:
                document = json.loads(store.read(info.key))
            except ObjectNotFoundError:
                continue
            found[int(document["step"])] = int(document["incarnation"].partition("-")[0])
    return found


def test_the_second_is_refused_and_a_frozen_one_replaced(store: Store, s3_server: S3Server, tmp_path: Path) -> None:
    endpoint = s3_server.endpoint
    with lone(store, endpoint=endpoint, folder=tmp_path / "first" / "log") as first:
        wait_until(lambda: bool(committed_by(store)), what="the first checkpoint")
        with lone(store, endpoint=endpoint, folder=tmp_path / "second" / "log") as second:
            assert second.wait(60) == 75, second.output()[-4000:]
        first.process.send_signal(signal.SIGSTOP)
        frozen_s = time.monotonic()
        with lone(store, "run.on_held=wait", endpoint=endpoint, folder=tmp_path / "third" / "log") as third:
            wait_until(lambda: 2 in committed_by(store).values(), what="a checkpoint of the third run", timeout_s=90)
            assert time.monotonic() - frozen_s < 60
            newest_of_first = max((step for step, number in committed_by(store).items() if number == 1), default=0)
            first.process.send_signal(signal.SIGCONT)
            assert first.wait(30) == 75, first.output()[-4000:]
            goal = max(committed_by(store)) + 15
            wait_until(lambda: max(committed_by(store)) >= goal, what="the third run to go on")
            assert all(step <= newest_of_first for step, number in committed_by(store).items() if number == 1)
            third.process.send_signal(signal.SIGTERM)
            assert third.wait(60) == 75
