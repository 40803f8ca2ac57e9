"""The worker's end of the channel to its launcher."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastictrain.bounded_json import JsonLines
from elastictrain.errors import EXIT_TRANSPORT, DetachedError
from elastictrain.fault import launcher_channel as module
from elastictrain.fault.launcher_channel import (
    AskToStop,
    Attach,
    Attached,
    Begun,
    Detach,
    Detached,
    DetachReceived,
    FromWorker,
    Introduced,
    LauncherChannel,
    LeaveOutSlow,
    encode_line,
    has_been_called,
    open_channel,
    tell_launcher,
)
from elastictrain.fault.reasons import Reason, SlowRank
from elastictrain.fault.stop import StopListener, StopRequest
from elastictrain.identity import Identity
from elastictrain.identity import Launcher as LauncherIdentity
from tests.unit.examples import examples

FIRST, SECOND = {"RANK": "1"}, {"RANK": "2"}


def with_channel(descriptor: int) -> Identity:
    launcher = LauncherIdentity(1, 1, restarted=False, folder="/nowhere", channel=descriptor)
    return Identity(1, 2, 1, 2, "host", launched=True, launcher=launcher)


class Launcher:
    """The other end."""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.stops: list[AskToStop] = []
        self.channel = LauncherChannel(self.theirs, on_stop=self.stops.append)
        self.identity = with_channel(self.theirs.fileno())

    def say(self, *messages: Attach | Detach | AskToStop) -> None:
        self.connection.sendall(b"".join(map(encode_line, messages)))

    def close(self) -> None:
        self.connection.close()
        # The reader ends with that.
        wait_for(lambda: not [one for one in threading.enumerate() if one.name == "launcher-channel"])
        self.theirs.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def detached(channel: LauncherChannel) -> str | None:
    try:
        channel.check_attached()
    except DetachedError as error:
        return str(error)
    return None


def test_a_generation_ends_with_a_reason_that_counts_as_a_broken_group(launcher: Launcher) -> None:
    channel = launcher.channel
    assert detached(channel) is None
    launcher.say(Detach("rank 0 is gone"))
    wait_for(lambda: channel.detach_reason)
    assert detached(channel) == "rank 0 is gone"
    assert detached(channel) == "rank 0 is gone", "as often as it asks"
    with pytest.raises(DetachedError) as caught:
        channel.check_attached()
    assert caught.value.exit_code == EXIT_TRANSPORT


def test_a_rank_ends_the_wait_and_begins_the_next_generation(launcher: Launcher) -> None:
    channel = launcher.channel
    launcher.say(Detach("over"))
    wait_for(lambda: channel.detach_reason)
    launcher.say(Attach(FIRST))
    assert channel.wait() == FIRST
    assert detached(channel) is None


def test_what_is_told_in_one_breath_is_taken_in_order(launcher: Launcher) -> None:
    channel = launcher.channel
    launcher.say(Detach("of the first"), Attach(FIRST), Detach("of the second"))
    assert channel.wait() == FIRST
    wait_for(lambda: channel.detach_reason == "of the second")
    # The second ended before this worker took part in it.
    assert detached(channel) == "of the second"
    launcher.say(Attach(SECOND))
    assert channel.wait() == SECOND
    assert detached(channel) is None


def test_a_detach_that_comes_late_is_forgotten_with_the_next_rank(launcher: Launcher) -> None:
    """The worker has left by itself, and waits already."""
    channel, acts = launcher.channel, []
    channel.on_detach(lambda: acts.append("abort"))
    channel.on_detach(None)
    tell_launcher(launcher.identity, Detached(EXIT_TRANSPORT))
    launcher.say(Detach("late"), Attach(FIRST))
    assert channel.wait() == FIRST
    assert detached(channel) is None
    channel.on_detach(lambda: acts.append("abort the second"))
    assert acts == []


class TestActing:
    def test_a_thread_acts_when_the_generation_ends(self, launcher: Launcher) -> None:
        acts: list[str] = []
        launcher.channel.on_detach(lambda: acts.append(threading.current_thread().name))
        launcher.say(Detach("over"))
        wait_for(lambda: acts)
        assert acts == ["launcher-channel"], "the main thread is blocked in a collective"

    def test_it_is_acknowledged_before_the_act(self, launcher: Launcher) -> None:
        """It kills those that cannot hear; leaving may take longer than it waits for that."""
        go_on = threading.Event()
        launcher.channel.on_detach(lambda: go_on.wait(20.0))
        launcher.say(Detach("over"))
        launcher.connection.settimeout(10.0)
        assert launcher.connection.recv(1 << 16) == encode_line(DetachReceived())
        go_on.set()

    def test_the_reason_is_there_before_the_act(self, launcher: Launcher) -> None:
        """What the act interrupts must find that the launcher has ended the generation."""
        seen: list[str | None] = []
        launcher.channel.on_detach(lambda: seen.append(detached(launcher.channel)))
        launcher.say(Detach("over"))
        wait_for(lambda: seen)
        assert seen == ["over"]

    def test_if_it_has_ended_already_there_is_nothing_to_free_the_main_thread_from(self, launcher: Launcher) -> None:
        launcher.say(Detach("over"))
        wait_for(lambda: launcher.channel.detach_reason)
        acts: list[str] = []
        with pytest.raises(DetachedError, match="over"):
            launcher.channel.on_detach(lambda: acts.append("abort"))
        launcher.channel.on_detach(None)
        assert acts == []

    def test_a_worker_may_end_its_generation_itself(self, launcher: Launcher) -> None:
        """Its watchdog, say, while the main thread waits in vain."""
        channel, acts = launcher.channel, list[str]()
        channel.on_detach(lambda: acts.append("abort"))
        channel.end_generation("rank 1 hangs")
        assert (detached(channel), acts) == ("rank 1 hangs", ["abort"])
        # The launcher learns of it, and tells all.
        launcher.say(Detach("a worker has failed"))
        wait_for(lambda: len(acts) == 2)
        assert detached(channel) == "rank 1 hangs", "the first reason stays"
        channel.on_detach(None)
        launcher.say(Attach(FIRST))
        assert channel.wait() == FIRST
        assert detached(channel) is None

    def test_never_after_it_was_taken_back(self, launcher: Launcher) -> None:
        acts: list[str] = []
        launcher.channel.on_detach(lambda: acts.append("abort"))
        launcher.channel.on_detach(None)
        launcher.say(Detach("over"))
        wait_for(lambda: launcher.channel.detach_reason)
        launcher.say(Attach(FIRST))
        launcher.channel.wait()
        assert acts == []

    @pytest.mark.parametrize("seed", range(examples(50)))
    def test_whichever_comes_first(self, seed: int, launcher: Launcher) -> None:
        """A worker begins to listen for the end in the moment in which the launcher tells of it."""
        acts: list[str] = []
        teller = threading.Thread(target=lambda: (time.sleep(seed * 2e-6), launcher.say(Detach("over"))))
        teller.start()
        try:
            launcher.channel.on_detach(lambda: acts.append("abort"))
        except DetachedError:
            acts.append("raised")
        teller.join()
        launcher.say(Attach(FIRST))
        assert launcher.channel.wait() == FIRST
        assert acts in (["abort"], ["raised"], ["abort", "raised"]), "not never"


class TestTheEndOfTheLauncher:
    def test_ends_the_wait(self, launcher: Launcher) -> None:
        threading.Timer(0.05, launcher.connection.close).start()
        assert launcher.channel.wait() is None

    def test_but_not_before_a_rank_that_was_given(self, launcher: Launcher) -> None:
        launcher.say(Attach(FIRST))
        launcher.connection.close()
        assert launcher.channel.wait() == FIRST
        assert launcher.channel.wait() is None

    def test_is_no_end_of_a_generation(self, launcher: Launcher) -> None:
        """A worker has another way to learn that its launcher is gone, and saves then."""
        launcher.connection.close()
        assert launcher.channel.wait() is None
        assert detached(launcher.channel) is None
        tell_launcher(launcher.identity, Introduced())

    @pytest.mark.parametrize(
        "garbage",
        [b"\n", b"{}\n", b"\xff\n", b'{"type":"detached","exit_code":0}\n', b'{"type":"attach","environment":{"A":1}}\n'],
    )
    def test_garbage_counts_as_that(self, garbage: bytes, launcher: Launcher) -> None:
        launcher.connection.sendall(garbage)
        launcher.say(Attach(FIRST))
        assert launcher.channel.wait() is None


def test_the_launcher_reads_what_the_worker_says(launcher: Launcher) -> None:
    said: list[FromWorker] = [
        Introduced(),
        Attached('{"NCCL_DEBUG": "INFO"}'),
        Begun(12),
        LeaveOutSlow(SlowRank(3, "rank 3 is slow")),
        LeaveOutSlow(None),
        Reason(3, 71, "reduce", 12, "a peer is gone: “é”\nand more", guilty=True, missing=(1, 2)),
        Detached(71),
    ]
    for message in said:
        tell_launcher(launcher.identity, message)
    lines: JsonLines[FromWorker] = JsonLines(FromWorker)  # type: ignore[arg-type]
    assert list(lines.feed(launcher.connection.recv(1 << 16))) == said


def test_without_a_launcher_nobody_is_told_or_calls() -> None:
    for identity in (Identity(0, 1, 0, 1, "host", launched=False), with_channel(-1)):
        tell_launcher(identity, Introduced())
        assert not has_been_called(identity)


def test_who_does_not_read_its_channel_can_see_that_it_is_called(launcher: Launcher) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        identity = with_channel(theirs.fileno())
        assert not has_been_called(identity)
        ours.sendall(encode_line(AskToStop("a worker has failed", 0.0, host_stays=False)))
        assert has_been_called(identity)


def test_a_stop_is_passed_on_and_ends_no_generation(launcher: Launcher) -> None:
    stop = AskToStop("b leaves", 1100.0, host_stays=True)
    launcher.say(stop, Attach(FIRST), stop)
    assert launcher.channel.wait() == FIRST
    wait_for(lambda: len(launcher.stops) == 2)
    assert (launcher.stops, detached(launcher.channel)) == ([stop, stop], None)


def test_a_variable_may_hold_anything_that_an_environment_holds(launcher: Launcher) -> None:
    given = {"A": "line\nbreak", "B": "", "C": 'quote " \\', "Ü": "é\u2028", "D": "x" * 300_000}
    launcher.say(Attach(given))
    assert launcher.channel.wait() == given


def test_without_a_launcher_there_is_no_channel() -> None:
    stop = StopListener()
    assert open_channel(with_channel(-1), stop) is None
    assert open_channel(Identity(0, 1, 0, 1, "host", launched=False), stop) is None


def test_the_descriptor_is_taken_over_and_goes_to_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[socket.socket, Callable[[AskToStop], None]]] = []
    monkeypatch.setattr(module, "LauncherChannel", lambda connection, *, on_stop: made.append((connection, on_stop)))
    stop = StopListener(lambda: 42.0, wall=lambda: 1042.0)
    ours, theirs = socket.socketpair()
    with ours:
        descriptor = theirs.detach()
        os.set_inheritable(descriptor, True)
        open_channel(with_channel(descriptor), stop)
        ((connection, on_stop),) = made
        with connection:
            assert not connection.get_inheritable()
            ours.sendall(b"x")
            assert connection.recv(9) == b"x"
        on_stop(AskToStop("spot", 1100.0, host_stays=True))
        assert stop.request == StopRequest("spot", 42.0, 100.0, host_stays=True)
