import importlib.util
import inspect
import json
import math
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from elastictrain import events
from elastictrain.events import Event, Journal, encode

STEP = events.Step(step=3, loss=0.1 + 0.2, lr=3e-4, grad_norm=1 / 3, positions=(64, 96), samples_per_s=10.0, tokens_per_s=1e5)
SECONDS: Mapping[str, float] = MappingProxyType({"read": 0.25})
EXAMPLES: list[Event] = [
    events.Start(
        world_size=2,
        hosts=("a", "b"),
        backend="gloo",
        device="cpu",
        config_digest="d",
        versions={"torch": "2"},
        seconds=SECONDS,
    ),
    events.FirstStep(step=1, seconds=SECONDS),
    events.Preflight(
        stage="hosts",
        level="full",
        reason="first start",
        counts={"pass": 3, "skip": 0, "warn": 1, "fail": 0},
        findings=({"check": "clock", "subject": "b"},),
        seconds=0.5,
    ),
    events.TransportPlanned(
        host="a",
        interface="eth0",
        rdma="none",
        variables={"NCCL_IB_DISABLE": "1"},
        reasons={"NCCL_IB_DISABLE": "no port"},
        kept={"NCCL_SOCKET_IFNAME": "eth1"},
    ),
    events.Recovery(
        rung="in_place",
        reason="local rank 1 was ended by SIGKILL",
        lost=("rank 1 on a",),
        seconds=SECONDS,
        resumed_step=6,
        steps_repeated=2,
        world_size=2,
        pids={"0": 7, "1": 8},
    ),
    events.Resume(step=7, tier="storage", checkpoint="step-000000007", bytes=10, seconds=SECONDS),
    STEP,
    events.StragglerFound(
        step=90, of_rank=3, host="b", phase="forward", own_s=0.2, others_s=0.1, step_s=0.3, steps=90, over=False
    ),
    events.Skip(step=3, loss=math.nan, grad_norm=math.inf, positions=(0, 4), in_a_row=1),
    events.Evaluated(step=3, loss=2.5, samples=256, seconds=1.5),
    events.Snapshot(step=3, slot=1, bytes=10, copy_s=0.2, stall_s=0.001),
    events.Compiled(key="k", loaded=None, found_files=0, new_files=44, stored="compile_cache/k", seconds=SECONDS),
    events.KeeperStarted(pid=7),
    events.KeeperLost(pid=7),
    events.Replicated(of_rank=1, step=3, host="b", bytes=10, seconds=0.5),
    events.ReplicationFailed(of_rank=1, step=3, host="b", error="no room"),
    events.MemoryShort(buffers=1, replicate=False, message="snapshots need more"),
    events.ReplicasDiverged(step=3, ranks=(2,), hosts=("c",), majority=True),
    events.CheckpointSlow(step=3, seconds=20.5, trouble=None),
    events.CheckpointSaved(step=3, checkpoint="step-000000003", reason="interval", bytes=1, seconds=SECONDS),
    events.CheckpointFailed(step=3, error="disk full", in_a_row=2),
    events.CheckpointRejected(checkpoint="step-000000003", file="a.safetensors", reason="digest"),
    events.CheckpointsPruned(checkpoints=("step-000000001",)),
    events.Failure(
        exit_code=71, error="line 1\nline 2 é", phase="reduce", step=3, last_heard={"rank 1": "x"}, flight_recorder=None
    ),
    events.Hang(
        guilty=("rank 1 on b",),
        hosts=("b",),
        reason="frozen",
        phase="forward",
        step=3,
        silent_s=11.0,
        bound_s=10.0,
        waiting={"rank 0 on a": "reduce of step 3"},
        text="hang: rank 1 on b",
        stacks=None,
    ),
    events.SaveIntervalChosen(
        step=3,
        seconds=120.0,
        limited_by="",
        save_s=0.5,
        write_s=8.0,
        recover_s=20.0,
        losses=1,
        kept=2,
        trained_s=3600.0,
        mean_time_to_loss_s=7200.0,
    ),
    events.StepSkipped(step=3, positions=(8, 12)),
    events.CollectiveFaultFound(
        kind="size",
        group="0",
        sequence=58,
        culprits=("rank 1 on b",),
        others=("rank 0 on a",),
        calls={"rank 1 on b": "all_reduce of [[7]] Float"},
        text="rank 1 on b called",
    ),
    events.Stop(step=3, reason="SIGTERM", exit_code=75, seconds=3.0, saved="memory", saved_step=3),
]
NAMES = {
    "first_step",
    "start",
    "preflight",
    "transport",
    "resume",
    "step",
    "skip",
    "straggler",
    "eval",
    "snapshot",
    "compiled",
    "keeper_started",
    "keeper_lost",
    "replicated",
    "replication_failed",
    "memory_short",
    "replicas_diverged",
    "checkpoint_slow",
    "checkpoint_saved",
    "checkpoint_failed",
    "checkpoint_rejected",
    "checkpoints_pruned",
    "failure",
    "recovery",
    "hang",
    "collective_fault",
    "step_skipped",
    "save_interval",
    "stop",
}


def decoded(event: Event) -> dict[str, object]:
    record = json.loads(encode(event, now=12.5, incarnation="000001-ab", rank=2))
    assert isinstance(record, dict)
    return record


def test_there_is_an_example_of_every_event() -> None:
    kinds = {kind for _, kind in inspect.getmembers(events, inspect.isclass) if issubclass(kind, Event) and kind is not Event}
    assert {type(example) for example in EXAMPLES} == kinds
    assert {example.event for example in EXAMPLES} == NAMES


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.event)
def test_every_event_is_one_line_of_json_with_all_its_fields(event: Event) -> None:
    line = encode(event, now=12.5, incarnation="000001-ab", rank=2)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    record = decoded(event)
    assert list(record)[:4] == ["time", "event", "incarnation", "rank"]
    assert (record["time"], record["event"], record["incarnation"], record["rank"]) == (12.5, event.event, "000001-ab", 2)
    assert set(record) == {"time", "event", "incarnation", "rank", *type(event).__struct_fields__}


def test_the_step_event_has_the_names_that_scripts_rely_on() -> None:
    record = decoded(STEP)
    assert {"step", "loss", "lr", "grad_norm", "positions", "tokens_per_s"} <= set(record)
    assert record["positions"] == [64, 96]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(loss: float) -> None:
    record = decoded(
        events.Step(step=1, loss=loss, lr=0.0, grad_norm=0.0, positions=(0, 1), samples_per_s=10.0, tokens_per_s=0.0)
    )
    assert isinstance(record["loss"], float)
    assert record["loss"].hex() == loss.hex()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value: float) -> None:
    line = encode(
        events.Step(step=1, loss=value, lr=1.0, grad_norm=value, positions=(0, 1), samples_per_s=10.0, tokens_per_s=1.0),
        now=0.0,
        incarnation="i",
        rank=0,
    )

    def refuse(text: str) -> object:
        raise AssertionError(text)

    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_what_is_not_finite_is_null_at_any_depth() -> None:
    record = decoded(structs.replace(EXAMPLES[0], seconds={"build": math.nan, "parts": (1.5, [math.inf], {"x": -math.inf})}))
    assert record["seconds"] == {"build": None, "parts": [1.5, [None], {"x": None}]}


class Log:
    """A log in memory."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.flushed = 0
        self.closed = 0

    def append(self, data: bytes) -> None:
        self.pieces.append(data)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


def test_the_journal_appends_one_piece_per_event_with_its_own_time() -> None:
    log, times = Log(), iter([1.0, 2.0])
    journal = Journal(log, incarnation="000002-cd", rank=1, clock=lambda: next(times))
    journal.record(STEP)
    journal.record(EXAMPLES[-1])
    assert (log.flushed, log.closed) == (0, 0)
    journal.flush()
    assert (log.flushed, log.closed) == (1, 0)
    journal.close()
    records = [json.loads(piece) for piece in log.pieces]
    assert [(record["time"], record["event"]) for record in records] == [(1.0, "step"), (2.0, "stop")]
    assert {(record["incarnation"], record["rank"]) for record in records} == {("000002-cd", 1)}
    assert log.closed == 1


def test_a_clock_that_is_set_leaves_the_events_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_s, real = [0.0], time.time
    monkeypatch.setenv("ELASTICTRAIN_BOOTED", "")
    monkeypatch.setattr(time, "time", lambda: real() + wrong_s[0])
    spec = importlib.util.find_spec("elastictrain.events")
    assert spec is not None
    assert spec.loader is not None
    started_now, log = importlib.util.module_from_spec(spec), Log()
    spec.loader.exec_module(started_now)
    journal = started_now.Journal(log, incarnation="i", rank=0)
    for wrong_s[0] in (0.0, -100.0, 3600.0, 0.0):
        journal.record(STEP)
    # One that its launcher starts later dates its events alike.
    started_now.share_event_clock()
    wrong_s[0] = -100.0
    spec.loader.exec_module(started_later := importlib.util.module_from_spec(spec))
    started_later.Journal(log, incarnation="i", rank=1).record(STEP)
    first, *others = (json.loads(piece)["time"] for piece in log.pieces)
    assert first == pytest.approx(real(), abs=1.0)
    assert [first, *others] == sorted([first, *others])
    assert others[-1] - first < 1.0


def test_the_journal_takes_events_from_several_threads_in_the_order_of_their_times() -> None:
    log = Log()
    ticks = iter(range(10_000))
    journal = Journal(log, incarnation="i", rank=0, clock=lambda: float(next(ticks)))
    threads = [threading.Thread(target=lambda: [journal.record(STEP) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [json.loads(piece)["time"] for piece in log.pieces] == [float(number) for number in range(400)]
