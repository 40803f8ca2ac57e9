"""The ladder of timeouts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.config.fault import FaultGroup
from elastictrain.config.ladder import check_ladder
from elastictrain.config.preflight import PreflightGroup, PreflightThresholds

PREFLIGHT = PreflightGroup()
OFF = PreflightGroup(level="off")


def test_defaults_form_a_ladder() -> None:
    assert check_ladder(FaultGroup(), preflight=PREFLIGHT) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"heartbeat_s": 120.0}, "fault.heartbeat_s"),
        ({"rendezvous_timeout_s": 1.0}, "fault.heartbeat_s"),
        ({"hang_floor_s": 1.0}, "fault.heartbeat_s"),
        ({"step_timeout_s": 601.0}, "fault.step_timeout_s"),
        ({"step_timeout_s": 600.0, "save_timeout_s": 600.0}, "fault.step_timeout_s"),
        ({"shutdown_grace_s": 30.0, "notice_s": 31.0}, "fault.shutdown_grace_s"),
        ({"shutdown_grace_s": 20.0, "notice_s": 20.0}, "fault.shutdown_grace_s"),
        ({"notice_s": 5.0}, "fault.shutdown_grace_s"),
    ],
)
def test_each_rung(changes: dict[str, float], key: str) -> None:
    options = replace(FaultGroup(hang_floor_s=500.0), **changes)
    assert [problem.key for problem in check_ladder(options, preflight=PREFLIGHT)] == [key]


def test_equal_step_and_init_timeouts_are_a_ladder() -> None:
    assert check_ladder(FaultGroup(init_timeout_s=60.0, step_timeout_s=60.0), preflight=OFF) == []


seconds = st.floats(0.1, 1000.0)


@given(seconds, seconds, seconds, seconds)
def test_good_only_when_every_wait_is_longer_than_what_it_waits_for(beat: float, step: float, init: float, save: float) -> None:
    fault = FaultGroup(
        heartbeat_s=beat,
        step_timeout_s=step,
        init_timeout_s=init,
        save_timeout_s=save,
        rendezvous_timeout_s=2000.0,
        hang_floor_s=2000.0,
    )
    assert (not check_ladder(fault, preflight=OFF)) == (beat < step <= init and step < save)


@pytest.mark.parametrize(
    ("preflight", "keys"),
    [
        (PreflightGroup(limit_s=599.0), []),
        (PreflightGroup(limit_s=600.0), ["preflight.limit_s"]),
        (PreflightGroup(limit_s=600.0, wait_s=700.0), ["preflight.wait_s", "preflight.limit_s"]),
        (PreflightGroup(limit_s=10.0, wait_s=10.0), ["preflight.wait_s"]),
        (PreflightGroup(limit_s=600.0, wait_s=700.0, level="off"), []),
        (PreflightGroup(thresholds=PreflightThresholds(clock_fail_s=0.5)), ["preflight.thresholds.clock_warn_s"]),
    ],
)
def test_a_preflight_ends_before_what_waits_for_it(preflight: PreflightGroup, keys: list[str]) -> None:
    assert [problem.key for problem in check_ladder(FaultGroup(), preflight=preflight)] == keys
