"""Cases in the form of torch 2.13's recorder (2.10 in its own count); torch's own analyzer is asked about each of them."""

import json
from argparse import Namespace
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.flight_recorder.components.builder import build_db

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.liveness.flight_recorder import (
    COMPARED_WORLD,
    CollectiveCall,
    CollectiveFault,
    Entered,
    Kind,
    find_collective_fault,
    parse_trace,
)

Call = tuple[str, list[int], str]
WORLD = (0, 1, 2)

REDUCE: Call = ("all_reduce", [4, 3], "Float")
SMALL: Call = ("all_reduce", [7], "Float")
HALF: Call = ("all_reduce", [4, 3], "Half")
BROADCAST: Call = ("broadcast", [4, 3], "Float")


def entry(record: int, call: Call, *, sequence: int, group: str = "0", state: str = "scheduled") -> dict[str, Any]:
    """As gloo wrote it in a run of three ranks; NCCL's differ in `profiling_name` and `state`."""
    op, sizes, dtype = call
    return {
        "record_id": record,
        "pg_id": int(group),
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1795486178037827975 + record,
        "input_sizes": [sizes],
        "input_dtypes": [dtype],
        "output_sizes": [sizes],
        "output_dtypes": [dtype],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 4000,
        "is_p2p": False,
    }


def dump(calls: Sequence[Call], *, done: int = 2, state: str = "scheduled", members: str = "[0, 1, 2]") -> dict[str, Any]:
    entries = [
        entry(place, call, sequence=place + 1, state="completed" if place < done else state) for place, call in enumerate(calls)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": members}}}


def fault_of(dumps: dict[int, dict[str, Any]]) -> CollectiveFault | None:
    # As other ranks get it, over the shared store.
    published = {
        rank: parse_record(encode_record(parse_trace(json.dumps(one)).shortened(3)), Entered) for rank, one in dumps.items()
    }
    return find_collective_fault(published)


def torchs_opinion(dumps: dict[int, dict[str, Any]]) -> tuple[int, set[int], set[int]] | None:
    """The first collective that torch's analyzer finds wrong: its number, and the ranks that are missing or differ."""
    details = {str(rank): {"rank": rank, **deepcopy(one)} for rank, one in dumps.items()}
    options = Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10)
    found = build_db(details, options, "2.10").collectives
    for one in found:
        if one.missing_ranks or one.mismatch_collectives:
            return one.collective_seq_id, set(one.missing_ranks or ()), set(one.mismatch_collectives or ())
    return None


BASE = (REDUCE, REDUCE)
CASES: list[tuple[str, dict[int, Sequence[Call]], Kind, int, tuple[int, ...]]] = [
    ("never came", {0: (REDUCE,), 1: (), 2: (REDUCE,)}, "missing", 3, (1,)),
    ("two never came", {0: (REDUCE,), 1: (), 2: ()}, "missing", 3, (1, 2)),
    ("other op", {0: (REDUCE,), 1: (BROADCAST,), 2: (REDUCE,)}, "op", 3, (1,)),
    ("other size", {0: (REDUCE,), 1: (REDUCE,), 2: (SMALL,)}, "size", 3, (2,)),
    ("other dtype", {0: (REDUCE,), 1: (HALF,), 2: (REDUCE,)}, "dtype", 3, (1,)),
    ("order", {0: (REDUCE, BROADCAST), 1: (BROADCAST, REDUCE), 2: (REDUCE, BROADCAST)}, "order", 3, (1,)),
    ("one call too many", {0: (REDUCE, BROADCAST), 1: (SMALL, REDUCE, BROADCAST), 2: (REDUCE, BROADCAST)}, "extra", 3, (1,)),
    ("one call too few", {0: (SMALL, REDUCE), 1: (REDUCE,), 2: (SMALL, REDUCE)}, "skipped", 3, (1,)),
]


@pytest.mark.parametrize(
    ("calls", "kind", "sequence", "culprits"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_first_collective_at_which_ranks_part_as_torch_finds_it(
    calls: dict[int, Sequence[Call]], kind: Kind, sequence: int, culprits: tuple[int, ...]
) -> None:
    dumps = {rank: dump((*BASE, *last)) for rank, last in calls.items()}
    found = fault_of(dumps)
    assert found is not None
    assert (found.kind, found.sequence, found.culprits) == (kind, sequence, culprits)
    opinion = torchs_opinion(dumps)
    assert opinion is not None
    number, missing, different = opinion
    assert (number, missing | different) == (sequence, set(culprits))
    assert bool(missing) is (kind == "missing")
    text = found.sentence("rank {}".format)
    assert all(f"rank {rank}" in text for rank in WORLD)
    assert f"no. {sequence} of group 0" in text


def test_the_first_rank_is_not_right_because_it_is_the_first() -> None:
    """torch compares with the first rank, so it names those that are right."""
    dumps = {rank: dump((*BASE, SMALL if rank == 0 else REDUCE)) for rank in WORLD}
    found = fault_of(dumps)
    assert found is not None
    assert found.culprits == (0,)
    assert torchs_opinion(dumps) == (3, set(), {1, 2})


def test_of_two_ranks_that_differ_both_are_named() -> None:
    found = fault_of({rank: dump((*BASE, call), members="[0, 1]") for rank, call in enumerate((REDUCE, SMALL))})
    assert found is not None
    assert (found.kind, found.culprits, found.others) == ("size", (0, 1), ())
    text = found.sentence("rank {}".format)
    assert "rank 0 called all_reduce of [[4, 3]]" in text
    assert "rank 1 called all_reduce of [[7]]" in text


def test_ranks_that_agree_have_no_fault() -> None:
    dumps = {rank: dump((*BASE, REDUCE)) for rank in WORLD}
    assert fault_of(dumps) is None
    assert torchs_opinion(dumps) is None
    assert fault_of({rank: dump(BASE) for rank in WORLD}) is None


@pytest.mark.parametrize(("op", "own"), [("all_to_all", "input_sizes"), ("scatter", "input_sizes"), ("gather", "output_sizes")])
def test_what_each_rank_may_give_in_its_own_size_is_no_mismatch(op: str, own: str) -> None:
    dumps = {rank: dump((*BASE, (op, [6], "Float"))) for rank in WORLD}
    dumps[1]["entries"][-1][own] = [[9]]
    assert fault_of(dumps) is None


def test_a_device_that_does_not_begin_what_was_called() -> None:
    dumps = {rank: dump((*BASE, REDUCE), state="scheduled" if rank == 2 else "started") for rank in WORLD}
    found = fault_of(dumps)
    assert found is not None
    assert (found.kind, found.culprits) == ("not_started", (2,))
    assert torchs_opinion(dumps) == (3, set(), {2})


def test_the_group_of_some_ranks_only_and_one_that_waits_elsewhere() -> None:
    dumps = {rank: dump((*BASE, REDUCE) if rank == 0 else BASE) for rank in WORLD}
    for rank in (1, 2):
        dumps[rank]["pg_config"]["1"] = {"name": "1", "desc": "undefined", "ranks": "[1, 2]"}
    dumps[1]["entries"].append(entry(2, SMALL, sequence=1, group="1"))
    found = fault_of(dumps)
    assert found is not None
    # Rank 0 waits for both, rank 1 for rank 2, which waits for nobody.
    assert (found.kind, found.culprits) == ("missing", (2,))


def test_calls_of_an_earlier_generation_do_not_count() -> None:
    old, new = (dump((*BASE, SMALL)), dump((REDUCE,), done=0))
    for place, one in enumerate(new["entries"]):
        one |= {"record_id": 10 + place, "time_created_ns": one["time_created_ns"] + 1000}
    text = json.dumps({"entries": [*new["entries"], *old["entries"]]})
    entered = parse_trace(text, since_ns=new["entries"][0]["time_created_ns"])
    assert entered.sequences == {"0": 1}
    assert [call.sequence for call in entered.calls] == [1]


def test_the_last_of_each_group_counts_and_the_newest_is_told() -> None:
    # The recorder is a ring: its entries need not be in order.
    entries = [
        entry(7, REDUCE, sequence=57),
        entry(5, REDUCE, sequence=56),
        entry(6, REDUCE, sequence=3, group="1"),
        entry(8, REDUCE, sequence=99) | {"is_p2p": True},
    ]
    found = parse_trace(json.dumps({"entries": entries}))
    assert found.sequences == {"0": 57, "1": 3}
    assert [token in found.last for token in ("all_reduce", "57", "[[4, 3]]")] == [True] * 3


@pytest.mark.parametrize(
    "trace",
    ["", "{}", "[]", '{"entries": []}', '{"entries": [{}]}', '{"entries": 5}', "null", '{"entries": [], "pg_config": 5}'],
)
def test_what_is_not_understood_says_nothing(trace: str) -> None:
    assert parse_trace(trace) == Entered()


def test_little_of_a_long_trace_is_published_and_enough() -> None:
    """A device may be hundreds of calls behind the process that has called them."""
    own = dump([REDUCE] * 2000, done=900)
    other = deepcopy(own)
    other["entries"][900] |= {"input_sizes": [[7]], "output_sizes": [[7]]}
    entered = parse_trace(json.dumps(own)).shortened(3)
    assert len(encode_record(entered)) < 8192
    found = fault_of({0: own, 1: other, 2: own})
    assert found is not None
    assert (found.kind, found.sequence, found.culprits) == ("size", 901, (1,))


def test_in_a_large_world_only_the_last_call_is_published() -> None:
    """All ranks read what all publish."""
    entered = parse_trace(json.dumps(dump([REDUCE] * 100, done=90, members=str([*range(1024)]))))
    few, many = entered.shortened(COMPARED_WORLD), entered.shortened(COMPARED_WORLD + 1)
    assert few.calls
    assert many == Entered(last=entered.last)
    assert len(encode_record(many)) < 512


def test_hundreds_of_sizes_are_compared_in_little_room() -> None:
    dumps = {rank: dump((*BASE, REDUCE)) for rank in WORLD}
    for rank, one in dumps.items():
        one["entries"][-1]["input_sizes"] = [[1024, 1024]] * 300 + [[rank // 2]]
    found = fault_of(dumps)
    assert found is not None
    assert (found.kind, found.culprits) == ("size", (2,))


def test_who_tells_nothing_is_not_accused() -> None:
    entered = {rank: parse_trace(json.dumps(dump((*BASE, REDUCE)))) for rank in (0, 1)}
    assert find_collective_fault(entered | {2: Entered()}) is None
    silent = replace(parse_trace(json.dumps(dump(BASE))), members={})
    assert find_collective_fault(entered | {2: silent}) is not None


names = st.sampled_from(["0", "1"])
entries = st.builds(
    CollectiveCall,
    names,
    st.integers(1, 4),
    st.sampled_from(["all_reduce", "broadcast"]),
    state=st.sampled_from(["done", "started", "waiting"]),
)
told = st.builds(
    Entered,
    st.dictionaries(names, st.integers(0, 4)),
    st.lists(entries, max_size=4).map(tuple),
    st.dictionaries(names, st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple)),
)


@given(st.dictionaries(st.integers(0, 3), told, min_size=1))
def test_whatever_ranks_tell_only_ranks_that_are_heard_are_named(traces: dict[int, Entered]) -> None:
    found = find_collective_fault(traces)
    if found is not None:
        assert found.culprits
        assert {*found.culprits, *found.others, *found.calls} <= traces.keys()
        assert not set(found.culprits) & set(found.others)
        assert found.event("rank {}".format).text
