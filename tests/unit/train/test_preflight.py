"""What a run makes of its preflight: the level, the records, what is shown, and who leaves."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
import torch.distributed as dist

from elastictrain.bounded_json import encode_record
from elastictrain.config.preflight import PreflightGroup, PreflightLimits, PreflightThresholds
from elastictrain.distributed.generation import AgreedGeneration, Introduction
from elastictrain.distributed.store import StoreExchange
from elastictrain.errors import DetachedError, HostUnfitError, PreflightError
from elastictrain.events import Event, Preflight, TransportPlanned
from elastictrain.identity import Identity, Launcher, RecoveryPlan, Rung
from elastictrain.lease.chain import StartRecord, Starts
from elastictrain.preflight.group.checks import GroupFindings, Request
from elastictrain.preflight.group.collectives import Collectives
from elastictrain.preflight.host_preflight import HostPreflight, Report
from elastictrain.preflight.policy import Chosen, Level, decide
from elastictrain.preflight.transport.infiniband import Rdma
from elastictrain.preflight.transport.plan import PlannedVariable, TransportPlan
from elastictrain.preflight.verdict import Verdict
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train import preflight as module
from elastictrain.train.preflight import EarlierStarts, RunPreflight, findings_in, last_exit_code
from tests.unit.checkpoint.fakes import FakeStore
from tests.unit.preflight.made import settings, verdict
from tests.unit.train.parts import context_of
from tests.unit.train.test_loop import config

PLAN = TransportPlan(
    host="a",
    variables=(PlannedVariable("GLOO_SOCKET_IFNAME", "eth0", "the kernel says so"),),
    kept=(PlannedVariable("NCCL_DEBUG", "INFO", "set in the environment"),),
    interface="eth0",
    rdma=Rdma.NONE,
    hcas=(),
    link_gbps=None,
)

Make = Callable[..., tuple[RunPreflight, list[Event], list[HostPreflight]]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def make(store: Store, monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(
        *,
        level: str = "auto",
        found: Sequence[Verdict] = (),
        restart: str = "0",
        settings: PreflightGroup | None = None,
        hosts: str = "a",
        backend: str = "gloo",
        launcher: Launcher | None = None,
        exchange: StoreExchange | None = None,
        planned: str = "ab",
        recovers: str = "",
        least: int = 1,
        kind: Literal["ddp", "fsdp", "hsdp"] = "ddp",
    ) -> tuple[RunPreflight, list[Event], list[HostPreflight]]:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        recorded: list[Event] = []
        checked: list[HostPreflight] = []

        def check(one: HostPreflight) -> Report:
            checked.append(one)
            return Report(
                verdicts=tuple(found),
                error=decide(found, host="a", hosts=["a"]),
                seconds=0.5,
                plan=PLAN,
            )

        monkeypatch.setattr(module.HostPreflight, "check", check)
        plain = config(steps=3)
        context = context_of(
            config=replace(
                plain,
                preflight=replace(settings or plain.preflight, level=level),
                launch=replace(plain.launch, min_hosts=least),
                parallel=replace(plain.parallel, kind=kind),
            ),
            identity=Identity(0, len(hosts), 0, 1, "a", launched=len(hosts) > 1, launcher=launcher),
            generation=AgreedGeneration(
                "000007-aa",
                tuple(Introduction(host, 1, "gloo", "d", planned=host in planned, recovers=host in recovers) for host in hosts),
            ),
            store=store,
            journal=SimpleNamespace(record=recorded.append),
            samples=SimpleNamespace(digest="x"),
            backend=backend,
            group=SimpleNamespace(device=torch.device("cpu"), backend=backend, control=None),
        )
        return RunPreflight(context, exchange or StoreExchange(dist.HashStore())), recorded, checked

    return made


def end(store: Store, incarnation: str, *codes: int | None) -> None:
    """What ranks of an earlier incarnation left; None: a rank that was killed."""
    for rank, code in enumerate(codes):
        last = {"event": "failure", "exit_code": code} if code is not None else {"event": "step", "step": 3}
        store.write(f"events/{incarnation}-r{rank:05d}.jsonl", json.dumps(last).encode() + b"\n")
    if codes:
        Starts(store).write(StartRecord(int(incarnation[:6]), incarnation, len(codes)))


def test_a_first_start_is_checked_in_full(make: Make) -> None:
    preflight, _, checked = make()
    assert (preflight.chosen.level, preflight.chosen.reason) == (Level.FULL, "first start")
    preflight.check_hosts()
    assert checked[0].own.level is Level.FULL


@pytest.mark.parametrize(
    ("codes", "level"), [((71, 71), "full"), ((71, None), "quick"), ((75, 75), "quick"), ((), "quick"), ((70, 71), "full")]
)
def test_a_restart_is_quick_unless_the_transport_failed(
    codes: tuple[int | None, ...], level: str, store: Store, make: Make
) -> None:
    end(store, "000005-cc", 71, 71)
    end(store, "000006-bb", *codes)
    if not codes:
        end(store, "000006-bb", 0)
    preflight, _, checked = make(restart="1")
    preflight.check_hosts()
    assert preflight.chosen.level == level
    assert checked[0].after_failure is (level == "full")


@pytest.mark.parametrize(("row", "level"), [({"excused": True}, "full"), ({"excused": False}, "quick"), ({}, "quick")])
def test_what_was_too_slow_is_measured_again_at_the_next_start(
    row: dict[str, bool], level: str, store: Store, make: Make
) -> None:
    end(store, "000006-bb", 75, 75)
    for stage in ("hosts", "group"):
        event = {"event": "preflight", "stage": stage, "findings": [{"check": "matmul", "status": "warn", **row}]}
        store.write("events/000006-bb-r00000.jsonl", json.dumps(event).encode() + b"\n")
        preflight, _, _ = make(restart="1")
        assert (preflight.chosen.level, preflight.chosen.after_failure) == (level, False)


@pytest.mark.parametrize(("least", "spare"), [(1, 2), (3, 0), (9, 0), (None, 0)])
def test_hosts_that_the_run_can_do_without(least: int | None, spare: int, make: Make) -> None:
    preflight, _, checked = make(hosts="abc", launcher=None if least is None else launched(), planned="", least=least or 1)
    preflight.check_hosts()
    assert checked[0].spare == spare


def follower(
    exchange: StoreExchange, store: Store, *, limit_s: float, level: str = "auto", launcher: Launcher | None = None
) -> RunPreflight:
    plain = config(steps=3)
    context = context_of(
        config=replace(plain, preflight=replace(plain.preflight, level=level, limit_s=limit_s)),  # type: ignore[arg-type]
        identity=Identity(1, 2, 1, 2, "a", launched=True, launcher=launcher),
        generation=AgreedGeneration("000007-aa", (Introduction("a", 2, "gloo", "d"),) * 2),
        store=store,
    )
    return RunPreflight(context, exchange)


def test_the_other_ranks_take_the_level_that_the_first_one_chose(store: Store) -> None:
    exchange = StoreExchange(dist.HashStore())
    exchange.put("level", encode_record(Chosen(Level.FULL, "because", after_failure=True)))
    chosen = follower(exchange, store, limit_s=5.0).chosen
    assert (chosen.level, chosen.reason, chosen.after_failure) == (Level.FULL, "because", True)


def launched(rung: Rung | None = None) -> Launcher:
    plan = RecoveryPlan(rung, ("rank 1 on a",), "SIGKILL", 0.0, 7) if rung is not None else None
    return Launcher(1, 2, restarted=rung is not None, folder="/tmp/x", recovery=plan)


class TestRecoveringInPlace:
    """The hosts and links are those that trained a moment ago: only the new group is checked."""

    @pytest.mark.parametrize("wanted", ["auto", "quick", "full"])
    @pytest.mark.parametrize("rung", ["in_place", "restart", "regroup", None])
    def test_only_then(self, wanted: str, rung: Rung | None, make: Make, store: Store) -> None:
        end(store, "000006-bb", 0)
        planned = "" if rung is None else "ab"
        chosen = make(level=wanted, hosts="ab", launcher=launched(rung), planned=planned)[0].chosen
        usual = {"auto": "full" if rung is None else "quick"}.get(wanted, wanted)
        assert chosen.level == ("group" if rung == "in_place" else usual)
        assert chosen.first_collective is (rung == "in_place")

    @pytest.mark.parametrize(
        ("wanted", "planned", "level", "brief"),
        [
            ("auto", "a", "quick", True),
            ("auto", "b", "quick", False),
            ("quick", "a", "quick", False),
            ("off", "a", "off", False),
        ],
    )
    def test_after_an_orderly_end_new_hosts_are_checked_and_of_the_group_the_first_collective(
        self, wanted: str, planned: str, level: str, brief: bool, make: Make, store: Store
    ) -> None:
        """The first host must have taken part: another one does not know whether something has failed."""
        end(store, "000006-bb", 75)
        launcher = replace(launched(None), restarted=True)
        chosen = make(level=wanted, hosts="ab", launcher=launcher, planned=planned)[0].chosen
        assert (chosen.level, chosen.first_collective) == (level, brief)

    def test_a_host_that_was_left_out_for_being_slow_is_measured_again(self, make: Make, store: Store) -> None:
        end(store, "000006-bb", 75)
        row = {"check": "bandwidth", "subject": "b", "status": "fail"}
        event = {"event": "preflight", "stage": "hosts", "findings": [row]}
        store.write("events/000006-bb-r00000.jsonl", json.dumps(event).encode() + b"\n")
        for hosts, level in (("ab", Level.FULL), ("ac", Level.QUICK)):
            launcher = replace(launched(None), restarted=True)
            chosen = make(hosts=hosts, launcher=launcher, planned="a")[0].chosen
            assert (chosen.level, chosen.first_collective) == (level, level is Level.QUICK)

    def test_an_orderly_end_that_broke_is_checked_in_full(self, make: Make, store: Store) -> None:
        end(store, "000006-bb", 71, 71)
        launcher = replace(launched(None), restarted=True)
        chosen = make(hosts="ab", launcher=launcher, planned="ab")[0].chosen
        assert (chosen.level, chosen.first_collective) == ("full", False)

    def test_what_another_host_knows_of_a_failure_counts(self, make: Make, store: Store) -> None:
        end(store, "000006-bb", 75)
        launcher = replace(launched(None), restarted=True)
        chosen = make(hosts="ab", launcher=launcher, planned="ab", recovers="b")[0].chosen
        assert (chosen.level, chosen.first_collective) == ("quick", False)

    @pytest.mark.parametrize("planned", ["", "a", "b"])
    def test_not_where_a_host_has_no_variables_of_an_earlier_preflight(self, planned: str, make: Make, store: Store) -> None:
        end(store, "000006-bb", 0)
        assert make(hosts="ab", launcher=launched("in_place"), planned=planned)[0].chosen.level is Level.QUICK

    def test_off_stays_off(self, make: Make) -> None:
        assert make(level="off", hosts="ab", launcher=launched("in_place"))[0].chosen.level is Level.OFF

    @pytest.mark.parametrize("wanted", ["auto", "quick", "full"])
    def test_a_rank_that_knows_of_no_recovery_follows_the_first(self, wanted: str, make: Make, store: Store) -> None:
        """Launchers judge for their own hosts, and ranks that check different things would wait for each other for ever."""
        exchange = StoreExchange(dist.HashStore())
        first = make(level=wanted, hosts="ab", launcher=launched("in_place"), exchange=exchange)[0]
        second = follower(exchange, store, limit_s=5.0, level=wanted, launcher=launched("restart"))
        assert (first.chosen.level, second.chosen) == (Level.GROUP, first.chosen)

    def test_hosts_are_not_checked(self, make: Make) -> None:
        preflight, recorded, checked = make(hosts="ab", launcher=launched("in_place"))
        preflight.check_hosts()
        assert (recorded, checked) == ([], [])

    @pytest.mark.parametrize(("sums", "error"), [((3, 3), None), ((3, 4), PreflightError), ((1, 1), PreflightError)])
    def test_the_first_collective_must_be_right_in_every_place(
        self, sums: tuple[int, int], error: type[Exception] | None, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summed: list[list[int]] = []

        def all_reduce(tensor: torch.Tensor, *, group: object) -> None:
            summed.append(tensor.tolist())
            tensor.copy_(torch.tensor(sums))

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        preflight, recorded, _ = make(hosts="ab", launcher=launched("in_place"))
        if error is not None:
            with pytest.raises(error):
                preflight.check_group(on_part=lambda _: None)
            assert recorded == []
        else:
            preflight.check_group(on_part=lambda _: None)
            (event,) = recorded
            assert isinstance(event, Preflight)
            assert (event.stage, event.level, event.counts, event.findings) == ("group", "group", {"pass": 1}, ())
        assert summed == [[1, 1]]

    @pytest.mark.parametrize(
        ("backend", "kind", "later"),
        [("nccl", "fsdp", True), ("nccl", "hsdp", False), ("nccl", "ddp", False), ("gloo", "fsdp", False)],
    )
    def test_nccl_connects_beside_the_restore(
        self, backend: str, kind: str, later: bool, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summed, go_on = threading.Event(), threading.Event()

        def all_reduce(tensor: torch.Tensor, *, group: object) -> None:
            assert go_on.wait(20.0 if later else 0.0) is later
            tensor.fill_(3)
            summed.set()

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        preflight, recorded, _ = make(hosts="ab", launcher=launched("in_place"), backend=backend, kind=kind)
        assert preflight.connects_later is later
        preflight.check_group(on_part=lambda _: None)
        assert len(recorded) == (not later)
        go_on.set()
        preflight._context.await_group()
        assert summed.is_set()
        assert len(recorded) == 1

    def test_who_waits_for_nccl_leaves_when_the_generation_ends(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on = threading.Event()
        monkeypatch.setattr(dist, "all_reduce", lambda _, group: go_on.wait(20.0))
        preflight, _, _ = make(hosts="ab", launcher=launched("in_place"), backend="nccl", kind="fsdp")
        preflight.check_group(on_part=lambda _: None)

        def leave() -> None:
            raise DetachedError("b has failed")

        monkeypatch.setattr(preflight._context, "leave_if_asked", leave)
        with pytest.raises(DetachedError):
            preflight._context.await_group()
        go_on.set()

    def test_a_world_of_one_has_no_collective(self, make: Make) -> None:
        preflight, recorded, _ = make(hosts="a", launcher=launched("in_place"))
        preflight.check_group(on_part=lambda _: None)
        assert recorded == []


def test_a_rank_that_is_told_no_level_does_not_wait_for_ever(store: Store) -> None:
    with pytest.raises(PreflightError, match=r"0\.2 s"):
        follower(StoreExchange(dist.HashStore()), store, limit_s=0.2)


@pytest.mark.parametrize("level", ["off", "quick", "full"])
def test_a_level_that_is_set_is_taken_on_a_first_start_and_on_a_restart(level: str, make: Make) -> None:
    for restart in ("0", "1"):
        chosen = make(level=level, restart=restart)[0].chosen
        assert (chosen.level, chosen.after_failure) == (level, False)


def test_off_checks_nothing(make: Make) -> None:
    preflight, recorded, checked = make(level="off")
    preflight.check_hosts()
    assert (recorded, checked) == ([], [])


def test_what_was_found_is_recorded_and_shown(make: Make, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    slow = verdict("warn", check="bandwidth", subject="a")
    for _ in range(2):
        preflight, recorded, _ = make(found=[slow, verdict(check="disk")])
        preflight.check_hosts()
        planned, event = recorded
        assert isinstance(planned, TransportPlanned)
        assert (planned.variables, planned.kept) == ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_DEBUG": "INFO"})
        assert isinstance(event, Preflight)
        assert (event.stage, event.counts["warn"], event.counts["pass"]) == ("hosts", 1, 1)
        assert [row["check"] for row in event.findings] == ["bandwidth"]
        row = {"event": "preflight", "stage": "hosts", "findings": list(event.findings)}
        store.write("events/000006-bb-r00000.jsonl", json.dumps(row).encode() + b"\n")
        Starts(store).write(StartRecord(6, "000006-bb", 1))
    shown = capsys.readouterr().err
    assert shown.startswith("preflight (full, first start): ")
    assert slow.remedy in shown
    assert "again: bandwidth" in shown
    assert "GLOO_SOCKET_IFNAME=eth0" in shown


def test_an_unfit_host_leaves(make: Make) -> None:
    preflight, recorded, _ = make(found=[verdict("fail", check="storage", subject="a")])
    with pytest.raises(HostUnfitError, match="storage"):
        preflight.check_hosts()
    assert [type(one) for one in recorded] == [TransportPlanned, Preflight]


@pytest.mark.parametrize(
    ("data", "exit_code"),
    [
        (b'{"event": "step"}\n{"event": "failure", "exit_code": 71}\n', 71),
        (b'{"event": "stop", "exit_code": 75}\n', 75),
        (b'{"event": "step", "exit_code": 75}\n', None),
        (b'{"event": "failure", "exit_code": "71"}\n', None),
        (b'{"event": "failure", "exit', None),
        (b"[1]\n", None),
        (b"\xff\n", None),
        (b"", None),
    ],
)
def test_the_last_word_of_a_rank(data: bytes, exit_code: int | None) -> None:
    assert last_exit_code(data) == exit_code


def test_a_rank_that_left_no_log_did_not_say_how_it_ended(store: Store, make: Make) -> None:
    """Where a log is sent now and then, one that is killed at once leaves none."""
    Starts(store).write(StartRecord(6, "000006-bb", 3))
    for rank in range(2):
        store.write(f"events/000006-bb-r{rank:05d}.part-00001.jsonl", b'{"event": "preflight"}\n')
        store.write(f"events/000006-bb-r{rank:05d}.part-00002.jsonl", b'{"event": "failure", "exit_code": 71}\n')
    assert EarlierStarts(store, number=7).exit_codes() == [71, 71, None]
    preflight, _, _ = make(restart="1")
    assert preflight.chosen.level is Level.QUICK


def test_of_a_long_log_its_ends_are_read() -> None:
    store = FakeStore()
    steps = b'{"event": "step"}\n' * 200_000
    Starts(store).write(StartRecord(6, "000006-bb", 1))
    end = b'{"event": "failure", "exit_code": 71}\n'
    finding = b'{"event": "preflight", "stage": "hosts", "findings": [{"check": "mtu"}]}\n'
    store.write("events/000006-bb-r00000.jsonl", finding + steps + end)
    num_read: list[int] = []
    read = store.read

    def counted(key: str, *, start: int = 0, end: int | None = None) -> bytes:
        data = read(key, start=start, end=end)
        num_read.append(len(data))
        return data

    store.read = counted  # type: ignore[method-assign]
    past = EarlierStarts(store, number=7)
    assert past.exit_codes() == [71]
    assert past.findings() == [[{"check": "mtu"}]]
    assert sum(num_read) < 1 << 20


def test_a_large_group_is_known_by_its_first_ranks() -> None:
    store = FakeStore()
    Starts(store).write(StartRecord(6, "000006-bb", 100))
    for rank in range(100):
        store.write(f"events/000006-bb-r{rank:05d}.jsonl", b'{"event": "failure", "exit_code": 71}\n')
    assert EarlierStarts(store, number=7).exit_codes() == [71] * 64


def test_findings_among_other_records() -> None:
    rows = [
        '{"event": "preflight", "stage": "hosts", "findings": [{"check": "mtu"}, 7]}',
        '{"event": "preflight", "stage": "hosts", "findings": 7}',
        '{"event": "preflight", "stage": "group", "findings": [{"check": "p2p"}]}',
        '{"event": "preflight"',
        '{"event": "step"}',
        "7",
    ]
    assert findings_in("\n".join(rows).encode()) == [{"check": "mtu"}, {"check": "p2p"}]
    assert findings_in(b'{"event": "step"}') is None


CHANGED = replace(
    PreflightGroup(),
    thresholds=PreflightThresholds(**{field.name: 0.123 for field in fields(PreflightThresholds)}),
    limits=PreflightLimits(**{field.name: 0.123 for field in fields(PreflightLimits)}),
)


@pytest.mark.parametrize("wanted", [PreflightGroup(), CHANGED], ids=["default", "changed"])
def test_thresholds_and_limits_reach_links_and_the_storage_round_trip(wanted: PreflightGroup, make: Make) -> None:
    preflight, _, checked = make(settings=wanted)
    preflight.check_hosts()
    assert checked[0].own.settings == replace(wanted, level="auto")


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the group checks find, and were asked."""
    told: dict[str, object] = {"verdicts": [verdict(check="present", subject="all", scope="group")], "usable": True}

    class FakeChecks:
        def __init__(self, group: object, exchange: object, identity: object, request: Request, **more: object) -> None:
            told["request"], told["hosts"], told["collectives"] = request, more["hosts"], more["collectives"]

        def run(self) -> GroupFindings:
            return GroupFindings(cast(list[Verdict], told["verdicts"]), bool(told["usable"]))

    monkeypatch.setattr(module, "GroupChecks", FakeChecks)
    return told


def test_collectives_are_recorded(make: Make, collectives: dict[str, object]) -> None:
    preflight, recorded, _ = make(settings=CHANGED, hosts="ab")
    preflight.check_group(on_part=lambda _: None)
    (event,) = recorded
    assert isinstance(event, Preflight)
    assert (event.stage, event.counts["pass"]) == ("group", 1)
    assert collectives["hosts"] == ("a", "b")
    request = cast(Request, collectives["request"])
    assert (request.full, request.settings) == (True, replace(CHANGED, level="auto"))


@pytest.mark.parametrize(("least", "code"), [(1, 69), (2, 0)])
def test_a_slow_rank_trains_where_its_host_cannot_be_spared(
    least: int, code: int, make: Make, collectives: dict[str, object]
) -> None:
    collectives["verdicts"] = [verdict("fail", check="matmul", subject="rank 0 on a")]
    preflight, recorded, _ = make(hosts="ab", launcher=launched(), planned="", least=least)
    with nullcontext() if code == 0 else pytest.raises(HostUnfitError):
        preflight.check_group(on_part=lambda _: None)
    (event,) = recorded
    assert isinstance(event, Preflight)
    assert [(row["status"], row["excused"]) for row in event.findings] == [("fail", False) if code else ("warn", True)]


def test_gloo_is_checked_in_host_memory_also_beside_a_gpu(make: Make, collectives: dict[str, object]) -> None:
    """It can send no tensor of a device from rank to rank."""
    make(hosts="ab", backend="gloo")[0].check_group(on_part=lambda _: None)
    assert collectives["collectives"] == Collectives(0, 2, torch.device("cpu"))
    make(hosts="ab", backend="nccl")[0].check_group(on_part=lambda _: None)
    assert collectives["collectives"] is None


def test_a_world_of_one_has_no_collectives(make: Make, collectives: dict[str, object]) -> None:
    preflight, recorded, _ = make()
    preflight.check_group(on_part=lambda _: None)
    assert (recorded, "request" in collectives) == ([], False)


@pytest.mark.parametrize(
    ("verdicts", "error"),
    [
        ([verdict("fail", check="collectives", subject="rank 0 on a")], HostUnfitError),
        ([verdict("fail", check="collectives", subject="rank 1 on b")], PreflightError),
        ([verdict("fail", check="collectives", subject="all", scope="group")], PreflightError),
    ],
)
def test_collectives_that_fail_end_the_start(
    verdicts: list[Verdict], error: type[Exception], make: Make, collectives: dict[str, object]
) -> None:
    collectives["verdicts"] = verdicts
    preflight, recorded, _ = make(hosts="ab")
    with pytest.raises(error):
        preflight.check_group(on_part=lambda _: None)
    assert [type(one) for one in recorded] == [Preflight]


def test_a_collective_that_hangs_ends_the_start_also_where_its_check_only_warns(
    make: Make, collectives: dict[str, object]
) -> None:
    collectives["verdicts"] = [verdict("fail", check="present", subject="rank 1 on b"), verdict(check="matmul", scope="group")]
    collectives["usable"] = False
    preflight, _, _ = make(settings=settings(present="off"), hosts="ab")
    with pytest.raises(PreflightError, match="rank 1"):
        preflight.check_group(on_part=lambda _: None)


def test_what_nccl_writes_is_looked_at_and_taken_away(
    make: Make, collectives: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "temporary_folder", lambda: str(tmp_path))
    for nobody in (make(backend="nccl"), make(backend="gloo", hosts="ab")):
        nobody[0].enable_nccl_log()
        assert "NCCL_DEBUG_FILE" not in os.environ, "there is nothing to look at in a world of one, or under gloo"
    preflight, _, _ = make(backend="nccl", hosts="ab")
    preflight.enable_nccl_log()
    assert Path(os.environ["NCCL_DEBUG_FILE"]).parent == tmp_path
    log = tmp_path / f"nccl-a-{os.getpid()}.txt"
    log.write_text("")
    preflight.check_group(on_part=lambda _: None)
    assert not [name for name in os.environ if name.startswith("NCCL_DEBUG")]
    assert not log.exists()
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    preflight.enable_nccl_log()
    assert "NCCL_DEBUG_FILE" not in os.environ, "a person reads it on the terminal"


def test_a_log_in_a_bucket_has_its_last_word_in_its_last_object(store: Store, make: Make) -> None:
    Starts(store).write(StartRecord(6, "000006-bb", 2))
    for rank in range(2):
        store.write(f"events/000006-bb-r{rank:05d}.part-00001.jsonl", b'{"event": "step"}\n')
        store.write(f"events/000006-bb-r{rank:05d}.part-00002.jsonl", b'{"event": "failure", "exit_code": 71}\n')
    preflight, _, _ = make(restart="1")
    assert preflight.chosen.level is Level.FULL


HOSTILE_LINES = (b"[" * 100_000, b"1" * 5_000, b'{"event":NaN}', b"\xff\xfe", b'{"event":"stop","event":"failure"}')


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=lambda line: repr(line[:12]))
def test_a_line_that_is_no_record_is_skipped_and_counted(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    good = b'{"event":"preflight","stage":"hosts","findings":[{"check":"mtu"}]}'
    start = b'{"event":"start","world_size":3}'
    data = b"\n".join([line + b'"preflight""start"', start, good, line + b'"preflight"', b""])
    assert findings_in(data) == [{"check": "mtu"}]
    assert "2 malformed" in caplog.text
    assert last_exit_code(line) is None
