import json

import pytest

from elastictrain.liveness.diagnosis import from_heartbeat, to_heartbeat
from elastictrain.liveness.progress import Phase, ProgressMark

MARK = ProgressMark(Phase.FORWARD, 7, 1, 100.0, True)


def test_a_standing_survives_its_way_through_the_store() -> None:
    beat = json.loads(json.dumps({**to_heartbeat(MARK, now_s=104.5, bound_s=10.0), "sequences": {"0": 57}, "collective": "x"}))
    assert beat["where"] == "forward of step 7, micro-batch 1"
    found = from_heartbeat(beat, rank=2, host="b", still_s=3.0)
    assert found is not None
    assert (found.name, found.mark.phase, found.mark.step, found.mark.micro_batch) == ("rank 2 on b", Phase.FORWARD, 7, 1)
    # What it did not say any more has passed, too.
    assert (found.silent_s, found.still_s, found.bound_s) == (7.5, 3.0, 10.0)
    assert (found.sequences, found.collective) == ({"0": 57}, "x")


@pytest.mark.parametrize(
    "broken",
    [
        {"phase": "lunch"},
        {"step": "seven"},
        {"bound_s": None},
        {"silent_s": float("inf")},
        {"sequences": {"0": "many"}},
        {"micro_batch": True},
    ],
)
def test_a_beat_of_another_release_is_no_standing(broken: dict[str, object]) -> None:
    assert from_heartbeat({**to_heartbeat(MARK, now_s=1.0, bound_s=1.0), **broken}, rank=0, host="a", still_s=0.0) is None
    assert from_heartbeat({"where": "data of step 1"}, rank=0, host="a", still_s=0.0) is None
