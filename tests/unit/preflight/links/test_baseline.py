import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.preflight.links.baseline import KEPT, Baseline, decode_baseline, encode_baseline, fold


def test_a_baseline_is_the_median_of_the_latest() -> None:
    baseline = None
    for gbps in [1.0] * 30 + [10.0] * 12:
        baseline = fold(baseline, one_way_gbps=gbps, both_ways_gbps=None, latency_s=1e-4)
    assert baseline is not None
    assert len(baseline.one_way_gbps) == KEPT
    assert baseline.typical_one_way_gbps() == 10.0
    assert baseline.typical_both_ways_gbps() is None
    assert decode_baseline(encode_baseline(baseline)) == baseline


def test_nothing_measured_changes_nothing() -> None:
    before = Baseline(one_way_gbps=(3.0,))
    assert fold(before, one_way_gbps=None, both_ways_gbps=0.0, latency_s=None) == before


GOOD = {"version": 1, "one_way_gbps": [1.0], "both_ways_gbps": [], "latency_s": []}


@pytest.mark.parametrize(
    "row",
    [
        [],
        {},
        {**GOOD, "version": 2},
        {**GOOD, "latency_s": None},
        {**GOOD, "one_way_gbps": ["fast"]},
        {**GOOD, "one_way_gbps": [0.0]},
        {**GOOD, "one_way_gbps": [True]},
        {**GOOD, "one_way_gbps": [float("inf")]},
    ],
)
def test_another_file_is_no_baseline(row: object) -> None:
    assert decode_baseline(json.dumps(row).encode()) is None


def test_a_written_file_is_one() -> None:
    assert decode_baseline(json.dumps(GOOD).encode()) == Baseline(one_way_gbps=(1.0,))


@given(st.binary(max_size=60))
def test_garbage_is_none(data: bytes) -> None:
    assert decode_baseline(data) is None
