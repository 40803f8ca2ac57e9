from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import RECORD, JsonLines, MalformedJsonError, as_record
from elastictrain.checkpoint.memory.slot import SnapshotId
from elastictrain.checkpoint.peers.placement import Peer
from elastictrain.checkpoint.saver.messages import (
    HostRanks,
    RunFinished,
    Saved,
    SaverRoster,
    SendReplicas,
    SlowSave,
    SnapshotTaken,
    StepTook,
    ToSaver,
    ToWorker,
    WorkerHello,
    encode,
)
from tests.unit.examples import examples

COUNTS = st.integers(0, 2**63 - 1)
HELLO: dict[str, Any] = {
    "op": "hello",
    "rank": 3,
    "ranks": [3, 2],
    "world_size": 4,
    "incarnation": "000001-aa",
    "agent": 7,
    "address": "",
}
PEER: dict[str, Any] = {"host": "a", "address": "10.0.0.1", "port": 7, "ranks": [0, 1], "number": 0}
ROSTER: dict[str, Any] = {"op": "roster", "hosts": [PEER], "own": 0, "token": "ab"}


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.builds(StepTook, COUNTS) | st.builds(SnapshotTaken, COUNTS, COUNTS, st.booleans()) | st.just(RunFinished()),
        max_size=5,
    ),
    st.integers(1, 50),
)
def test_whatever_the_pieces_the_messages_come_whole(sent: list[ToSaver], size: int) -> None:
    data = b"".join(encode(message) for message in sent)
    lines = JsonLines(ToSaver)
    received = [message for at in range(0, len(data), size) for message in lines.feed(data[at : at + size])]
    assert received == sent


@settings(max_examples=examples(500))
@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    try:
        assert not list(JsonLines(ToSaver).feed(data + b"\n"))
    except MalformedJsonError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 5000 + b"\n",
        b"7\n",
        b"{}\n",
        b'{"op": 3}\n',
        b'{"op": "what"}\n',
        b'{"op": "saved", "step": 1, "checkpoint": "c", "bytes": 1}\n',
        b"x" * (RECORD.max_bytes + 1),
        b"\xff\n",
        b"1" * 9999 + b"\n",
    ],
)
def test_no_messages_to_a_saver(data: bytes) -> None:
    with pytest.raises(MalformedJsonError):
        list(JsonLines(ToSaver).feed(data))


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 1 << 63, 10**400])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(MalformedJsonError):
        as_record({"op": "step", "micros": value}, ToSaver)
    assert as_record({"op": "step", "micros": (1 << 63) - 1}, ToSaver) == StepTook((1 << 63) - 1)


def test_the_kinds_on_the_wire() -> None:
    assert as_record(HELLO, ToSaver).host_ranks == HostRanks("000001-aa", 4, (2, 3))
    assert encode(SendReplicas(5, safe=SnapshotId("a", 3))) == b'{"op":"send","step":5,"unpaced":false,"safe":["a",3]}\n'
    assert encode(RunFinished()) == b'{"op":"finish"}\n'
    assert encode(Saved(5, "c", 7)) == b'{"op":"saved","step":5,"checkpoint":"c","bytes":7}\n'
    assert as_record({"op": "slow", "step": 5, "seconds": 30}, ToWorker) == SlowSave(5, 30, "")


@pytest.mark.parametrize(
    "change",
    [{"ranks": []}, {"ranks": [2]}, {"ranks": [3, -1]}, {"ranks": 3}, {"world_size": 3}, {"rank": 1}, {"incarnation": 7}],
)
def test_no_hello(change: dict[str, object]) -> None:
    with pytest.raises(MalformedJsonError):
        as_record(HELLO | change, WorkerHello)


def test_a_roster_comes_as_it_was_sent() -> None:
    roster = SaverRoster((Peer("a", "10.0.0.1", 7, (0, 1), 0), Peer("b", "fe80::1", 8, (), 1)), 1, "ab" * 32)
    (received,) = JsonLines(ToSaver).feed(encode(roster))
    assert received == roster


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""},
        {"host": 3},
        {"address": "a\nb"},
        {"address": "a" * 256},
        {"port": 0},
        {"port": 65536},
        {"port": True},
        {"ranks": 1},
        {"ranks": [-1]},
        {"number": 1.0},
    ],
)
def test_a_peer_with_a_wrong_field_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedJsonError, match=r"\$.hosts\[0\]"):
        as_record(ROSTER | {"hosts": [PEER | change]}, SaverRoster)


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": []},
        {"hosts": [PEER, PEER | {"ranks": []}]},
        {"hosts": [PEER, PEER | {"ranks": [1], "number": 1}]},
        {"own": 1},
        {"token": ""},
        {"token": "no hexadecimal"},
    ],
)
def test_no_roster(change: dict[str, object]) -> None:
    with pytest.raises(MalformedJsonError):
        as_record(ROSTER | change, SaverRoster)


def test_whoever_is_lenient_reads_on() -> None:
    lines = JsonLines(ToSaver, lenient=True)
    long = b"[" + b"1," * RECORD.max_bytes
    assert list(lines.feed(b"{\n" + encode(RunFinished()) + long)) == [RunFinished()]
    assert list(lines.feed(b"1]\n" + encode(RunFinished()))) == [RunFinished()]
