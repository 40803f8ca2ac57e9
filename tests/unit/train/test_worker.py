"""What a worker tells its launcher of the step that it has reached."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elastictrain.config.load import load
from elastictrain.errors import EXIT_BUG, EXIT_STOPPED
from elastictrain.fault.meaning import Meaning
from elastictrain.fault.reasons import Reason, read_reasons
from elastictrain.fault.whereabouts import Phase
from elastictrain.identity import Identity, Launcher
from elastictrain.train.build import Built
from elastictrain.train.leaving import Reached
from elastictrain.train.worker import Worker


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """The second of two, in step 9."""
    config = load(["recipe=llama_tiny", "run.dir=run"], with_task=False)
    launcher = Launcher(1, 1, restarted=False, folder=str(tmp_path))
    made = Worker(config, Identity(1, 2, 1, 2, "host", launched=True, launcher=launcher), parent=1)
    made._whereabouts.enter(Phase.FORWARD, step=9)
    return made


def told(folder: Path) -> Reason:
    (reason,) = read_reasons(str(folder))
    return reason


@pytest.mark.parametrize(
    ("reached", "step"),
    [
        (Reached(9, "storage"), 9),
        (Reached(9, "memory"), 9),
        (Reached(6, "memory"), 6),
        (Reached(6, "peer"), 6),
        (Reached(0, "nothing"), 0),
        (Reached(9, "nothing"), 0),
    ],
    ids=str,
)
def test_a_stop_is_told_with_the_step_that_is_safe(reached: Reached, step: int, worker: Worker, tmp_path: Path) -> None:
    built = SimpleNamespace(loop=SimpleNamespace(state=SimpleNamespace(step=9)), close=lambda *, finished: None)
    worker._say_goodbye(cast(Built, built), code=EXIT_STOPPED, reason="SIGTERM", reached=reached)
    assert (told(tmp_path).exit_code, told(tmp_path).step, told(tmp_path).sentence) == (EXIT_STOPPED, step, "SIGTERM")


def test_a_failure_is_told_with_the_step_that_it_was_in(worker: Worker, tmp_path: Path) -> None:
    worker._report(Meaning(EXIT_BUG, "ZeroDivisionError", show_stack=True), stack="", heard={})
    assert (told(tmp_path).phase, told(tmp_path).step) == ("forward", 9)


def test_who_is_stopped_where_nothing_can_be_saved_has_reached_nothing(worker: Worker, tmp_path: Path) -> None:
    # Compiling takes too long: the watchdog ends it, and the launcher would wait for a step that nobody has.
    worker._report(Meaning(EXIT_STOPPED, "asked to stop", show_stack=True), stack="", heard={})
    assert (told(tmp_path).exit_code, told(tmp_path).phase, told(tmp_path).step) == (EXIT_STOPPED, "forward", 0)
