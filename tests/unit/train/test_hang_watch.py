import errno
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastictrain.bounded_json import JsonLines, parse_record
from elastictrain.config.composed import FaultGroup
from elastictrain.events import Event, Hang
from elastictrain.fault.launcher_channel import Monitored
from elastictrain.identity import Identity, Launcher
from elastictrain.liveness import monitor_client
from elastictrain.liveness.diagnosis import RankStatus, diagnose
from elastictrain.liveness.monitor_client import MonitoredHost, RankMonitorClient
from elastictrain.liveness.progress import Phase, ProgressMark, ProgressTracker
from elastictrain.liveness.progress_file import ProgressFileReader
from elastictrain.liveness.stacks import STACKS_SIGNAL
from elastictrain.liveness.watchdog import LAUNCHER_PATIENCE_S, LOST_PATIENCE_S, Others, Overdue
from elastictrain.train import hang_watch as module
from elastictrain.train.hang_watch import HangWatch

ALONE = Identity(0, 1, 0, 1, "a", launched=False)
HUNG = Overdue(71, "no progress for 11.0 s in reduce of step 7 (limit 10 s)", hangs=True)


class StalledJournal:
    """Storage that does not come back while somebody else waits for it."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.records: list[Event] = []

    def record(self, event: Event) -> None:
        self.records.append(event)
        self.released.wait(10.0)


def watch(identity: Identity, journal: object = None) -> tuple[HangWatch, ProgressTracker]:
    config = SimpleNamespace(fault=FaultGroup(), run=SimpleNamespace(dir="run"), telemetry=SimpleNamespace(flush_s=1.0))
    tracker = ProgressTracker()
    made = HangWatch(config, identity, tracker)  # type: ignore[arg-type]
    generation = SimpleNamespace(name="000001-abc")
    made.begin(SimpleNamespace(generation=generation, journal=journal, heartbeats=None, store=None))  # type: ignore[arg-type]
    return made, tracker


@pytest.fixture
def journal() -> Iterator[StalledJournal]:
    made = StalledJournal()
    yield made
    made.released.set()


def test_a_rank_that_nobody_starts_again_is_not_watched_from_outside() -> None:
    hangs, _ = watch(ALONE)
    assert hangs.others() == Others()
    hangs.beat()
    hangs.announce_ending()
    hangs.close()


@pytest.mark.parametrize(
    ("rank", "kind", "holds_up"),
    [(1, "missing", True), (1, "not_started", True), (0, "missing", False), (1, "mismatch", False), (1, "", False)],
)
def test_a_rank_holds_others_up_if_it_has_not_entered_their_collective(rank: int, kind: str, holds_up: bool) -> None:
    """One that has entered it is behind, too, where a link loses what it waits for."""
    hangs, _ = watch(replace(ALONE, rank=rank))
    assert not hangs.holds_others_up
    fault = SimpleNamespace(kind=kind, culprits=(1,)) if kind else None
    guilty = SimpleNamespace(fault=fault, is_guilty=lambda one: one == rank)
    hangs._peer_monitor = SimpleNamespace(diagnosis=guilty)  # type: ignore[assignment]
    assert hangs.holds_others_up is holds_up


def test_a_rank_that_is_alone_is_guilty_itself() -> None:
    records: list[Event] = []
    hangs, tracker = watch(ALONE, SimpleNamespace(record=records.append))
    tracker.set_phase(Phase.REDUCE, step=7)
    sentence = hangs.name_culprits(HUNG)
    hangs.keep_record()
    (hang,) = records
    assert isinstance(hang, Hang)
    (guilty,) = hang.guilty
    assert ({*guilty.split()} >= {"0", "a"}, hang.hosts, hang.step, guilty in sentence) == (True, ("a",), 7, True)


def test_what_is_no_hang_accuses_nobody() -> None:
    records: list[Event] = []
    hangs, _ = watch(ALONE, SimpleNamespace(record=records.append))
    peer_lost = Overdue(71, "rank 1 is gone", show_stacks=False)
    assert hangs.name_culprits(peer_lost) == ""
    hangs.keep_record()
    assert records == []


def test_storage_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, journal: StalledJournal) -> None:
    monkeypatch.setattr(module, "_STORE_LIMIT_S", 0.05)
    hangs, _ = watch(ALONE, journal)
    hangs.name_culprits(HUNG)
    hangs.keep_record()
    assert len(journal.records) == 1
    assert not journal.released.is_set()


@pytest.mark.parametrize(("backend", "patience_s"), [("nccl", 0.0), ("gloo", LOST_PATIENCE_S)])
def test_a_lost_peer_is_noticed_by_the_collectives_of_some_backends(backend: str, patience_s: float) -> None:
    hangs, _ = watch(ALONE)
    hangs.group_formed(backend, SimpleNamespace(lost=(0, 5.0)))  # type: ignore[arg-type]
    lost = hangs.others().lost
    assert lost is not None
    assert (lost.since_s, lost.patience_s, "0" in lost.name) == (5.0, patience_s, True)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_where_a_launcher_frees_this_process_it_gets_the_time_to(backend: str, tmp_path: Path) -> None:
    launcher = Launcher(1, 1, restarted=False, folder=str(tmp_path))
    config = SimpleNamespace(fault=FaultGroup())
    hangs = HangWatch(config, replace(ALONE, launched=True, launcher=launcher), ProgressTracker())  # type: ignore[arg-type]
    hangs.group_formed(backend, SimpleNamespace(lost=(0, 5.0)))  # type: ignore[arg-type]
    lost = hangs.others().lost
    assert lost is not None
    assert (lost.since_s, lost.patience_s) == (5.0, LAUNCHER_PATIENCE_S)


class NoPeerMonitor:
    in_vain = False

    def __init__(self, heartbeats: object, **_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def no_memory(descriptor: int, start: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_process(self: RankMonitorClient) -> None:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.fixture
def the_signal_as_before() -> Iterator[None]:
    before = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, before)


@pytest.mark.usefixtures("the_signal_as_before")
@pytest.mark.parametrize(
    ("part", "name", "refuse", "why"),
    [
        (os, "posix_fallocate", no_memory, "No space left"),
        (RankMonitorClient, "start_monitor", no_process, "Resource temporarily unavailable"),
    ],
    ids=["no memory", "no watcher"],
)
def test_a_host_that_cannot_be_watched_trains_on(
    part: object,
    name: str,
    refuse: object,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = tmp_path / "marks"
    monkeypatch.setattr(module, "PeerMonitor", NoPeerMonitor)
    monkeypatch.setattr(monitor_client, "default_parent", lambda: str(parent))
    monkeypatch.setattr(part, name, refuse)
    hangs, tracker = watch(Identity(0, 2, 0, 2, "a", launched=True))
    (warning,) = [record for record in caplog.records if record.name == module.__name__]
    assert why in warning.getMessage()
    assert list(tmp_path.iterdir()) == []
    # Nothing of it is left that could tell stacks, or be told of.
    assert not faulthandler.unregister(STACKS_SIGNAL)
    tracker.set_phase(Phase.DATA, step=1)
    hangs.beat()
    hangs.close()


@pytest.mark.usefixtures("the_signal_as_before")
@pytest.mark.parametrize(("local_rank", "has_launcher"), [(0, True), (1, True), (0, False), (1, False)])
def test_a_launcher_watches_its_workers_itself_and_is_told_by_the_first_of_a_host(
    local_rank: int, has_launcher: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PeerMonitor", NoPeerMonitor)
    monkeypatch.setattr(monitor_client, "default_parent", lambda: str(tmp_path / "marks"))
    started: list[str] = []
    monkeypatch.setattr(RankMonitorClient, "start_monitor", lambda self: started.append(self.folder))
    channel = os.open(tmp_path / "channel", os.O_WRONLY | os.O_CREAT)
    launcher = Launcher(1, 1, restarted=False, folder=str(tmp_path / "launch"), channel=channel) if has_launcher else None
    identity = Identity(4 + local_rank, 8, local_rank, 2, "a", launched=True, launcher=launcher)
    hangs, _ = watch(identity)
    os.close(channel)
    told = list(JsonLines(Monitored).feed((tmp_path / "channel").read_bytes()))
    folder = f"{tmp_path}/marks/000001-abc-r00004"
    assert started == ([folder] if local_rank == 0 and launcher is None else [])
    if local_rank == 0 and has_launcher:
        (message,) = told
        facts = parse_record(message.facts, MonitoredHost)
        assert (message.folder, facts.ranks, facts.generation, facts.host) == (folder, (4, 5), "000001-abc", "a")
    else:
        assert told == []
    reader = ProgressFileReader(folder, identity.rank)
    found = reader.read()
    assert found is not None
    assert not found.closed
    hangs.close_monitor()
    found = reader.read()
    assert found is not None
    assert found.closed, "who watches waits for it no more"
    hangs.close()
    hangs.beat()


def test_what_a_rank_had_entered_when_its_silence_began_is_kept_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flight_recorder", lambda: '{"entries": []}')
    hangs, tracker = watch(ALONE)
    tracker.set_phase(Phase.REDUCE, step=7)
    assert hangs.trace is None
    hangs.entered()
    assert hangs.trace == '{"entries": []}'
    tracker.set_phase(Phase.UPDATE, step=7)
    assert hangs.trace is None, "that silence was no hang"


class TestWhoLeavesItsGeneration:
    """A rank that only waits for another one goes on in the next generation; one that hangs itself must end."""

    def diagnosed(self, guilty: int | None, monkeypatch: pytest.MonkeyPatch) -> HangWatch:
        """Of rank 0 of two, with what is known of the other."""
        places = {0: Phase.REDUCE, 1: Phase.REDUCE}
        if guilty is not None:
            places[guilty] = Phase.DATA
        found = diagnose(
            [RankStatus(rank, "a", ProgressMark(phase, 7, 0, 0.0, True), 50.0, 10.0) for rank, phase in places.items()],
            frozen_s=1000.0,
        )

        class Diagnosed(NoPeerMonitor):
            diagnosis = found

        monkeypatch.setattr(module, "PeerMonitor", Diagnosed)
        monkeypatch.setattr(RankMonitorClient, "__init__", no_client)
        hangs, _ = watch(Identity(0, 2, 0, 2, "a", launched=True))
        return hangs

    @pytest.mark.parametrize(("guilty", "waits"), [(1, True), (0, False), (None, False)])
    def test_by_whom_a_hang_is_blamed_on(self, guilty: int | None, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.diagnosed(guilty, monkeypatch).waits_for_another(HUNG) is waits

    def test_a_lost_rank_is_waited_for_in_vain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lost = Overdue(71, "rank 1 is gone", show_stacks=False)
        assert self.diagnosed(None, monkeypatch).waits_for_another(lost)

    def test_where_nothing_is_known_of_the_others_nobody_is_waited_for(self) -> None:
        hangs, _ = watch(ALONE)
        assert not hangs.waits_for_another(HUNG)

    def test_an_end_that_was_asked_for_and_takes_too_long_is_no_wait(self) -> None:
        hangs, _ = watch(ALONE)
        assert not hangs.waits_for_another(Overdue(71, "asked to stop, and still in reduce", show_stacks=True))


def no_client(self: RankMonitorClient, *_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
