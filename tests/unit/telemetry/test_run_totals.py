from pathlib import Path

import pytest

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.telemetry.loggers import MetricPoint
from elastictrain.telemetry.run_totals import RunTotals, RunTotalsLogger
from tests.unit.telemetry.runs import run_of


def test_goodput_is_the_share_of_new_steps_in_the_time_of_the_largest_world() -> None:
    one = RunTotals().begin(time=100.0, world_size=1, first_step=1, newest_step=0)
    one = one.add(time=110.0, step=4, step_s=2.0, world_size=1)
    assert one.scalars() == {"run/goodput": 0.8, "run/restarts": 0.0, "run/lost_steps": 0.0}
    # Ten seconds without a generation, then two workers.
    two = one.begin(time=120.0, world_size=2, first_step=3, newest_step=0)
    assert two.scalars() == {"run/goodput": 0.4, "run/restarts": 1.0, "run/lost_steps": 2.0}
    # Steps 3 and 4 are repeated.
    two = two.add(time=130.0, step=6, step_s=2.5, world_size=2)
    assert two.scalars()["run/goodput"] == pytest.approx((4 * 2.0 + 2 * 2.5 * 2) / (20.0 + 10.0 * 2))
    # The second worker is absent.
    three = two.begin(time=130.0, world_size=1, first_step=7, newest_step=0)
    assert three.add(time=140.0, step=7, step_s=1.0, world_size=1).worker_s == 60.0


def test_steps_after_the_last_record_were_done_and_lost() -> None:
    one = RunTotals().begin(time=0.0, world_size=1, first_step=1, newest_step=0)
    one = one.add(time=10.0, step=10, step_s=1.0, world_size=1)
    two = one.begin(time=20.0, world_size=1, first_step=13, newest_step=15)
    assert (two.new_steps, two.lost_steps) == (15, 3)
    again = two.add(time=21.0, step=15, step_s=1.0, world_size=1)
    assert again.new_steps == 15
    assert again.scalars()["run/goodput"] == 15 / 21


def test_what_is_lost_twice_counts_from_where_the_last_start_has_come() -> None:
    one = (
        RunTotals().begin(time=0.0, world_size=1, first_step=1, newest_step=0).add(time=9.0, step=100, step_s=0.0, world_size=1)
    )
    two = one.begin(time=10.0, world_size=1, first_step=91, newest_step=100)
    assert two.lost_steps == 10
    # One step later, and then after two more, of which only one is known from the record.
    again = two.add(time=11.0, step=91, step_s=0.0, world_size=1).begin(time=12.0, world_size=1, first_step=91, newest_step=91)
    assert (again.lost_steps, again.new_steps) == (11, 100)
    last = again.add(time=13.0, step=91, step_s=0.0, world_size=1).begin(time=14.0, world_size=1, first_step=92, newest_step=92)
    assert (last.lost_steps, last.new_steps, last.step) == (12, 100, 100)


def test_a_run_that_is_older_than_its_record_has_lost_nothing() -> None:
    one = RunTotals().begin(time=0.0, world_size=1, first_step=8, newest_step=9)
    assert (one.starts, one.lost_steps, one.step) == (1, 0, 7)


def test_a_clock_that_goes_back_takes_no_time_away() -> None:
    one = RunTotals().begin(time=10.0, world_size=1, first_step=1, newest_step=0)
    assert one.add(time=20.0, step=2, step_s=1.0, world_size=1).add(time=5.0, step=3, step_s=1.0, world_size=1).worker_s == 10.0


def log_one_generation(store: Store, began: float, *steps: int, newest_step: int = 0, measured: bool = True) -> RunTotalsLogger:
    """Points are `step` seconds after the begin; each step but the first takes half a second, if that is measured."""
    logger = RunTotalsLogger(began=began, newest_step=newest_step)
    logger.open(run_of(store, first_step=steps[0]))
    for step in steps:
        logger.log(MetricPoint(step, began + step, {"speed/step_s": 9.0 if step == steps[0] else 0.5} if measured else {}))
    return logger


def test_each_start_continues_the_record_even_if_the_one_before_was_killed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log_one_generation(store, 100.0, 1, 2, 3)
    last = log_one_generation(store, 110.0, 3, 4, 5, newest_step=4)
    assert last.scalars["run/restarts"] == 1.0
    assert last.scalars["run/lost_steps"] == 2.0
    # The first step of a start, which warms up, counts as a usual one.
    assert last.scalars["run/goodput"] == pytest.approx(5 * 0.5 / 15.0)
    last.close(complete=True)
    again = RunTotalsLogger(began=120.0, newest_step=0)
    again.open(run_of(store, first_step=6))
    assert again.scalars["run/goodput"] == pytest.approx(2.5 / 20.0)


def test_a_loop_that_measures_no_steps_has_a_goodput(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert log_one_generation(store, 100.0, 1, 4, 6, measured=False).scalars["run/goodput"] == 1.0


def test_a_damaged_record_begins_anew(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log_one_generation(store, 100.0, 1, 2)
    (record,) = (tmp_path / "telemetry").iterdir()
    record.write_bytes(record.read_bytes()[:-3])
    assert log_one_generation(store, 200.0, 2, 3).scalars["run/restarts"] == 0.0
