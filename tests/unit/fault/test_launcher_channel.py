"""The worker's end of the channel to its launcher."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastictrain.errors import EXIT_TRANSPORT, DetachedError
from elastictrain.fault import launcher_channel as module
from elastictrain.fault.launcher_channel import (
    CHANNEL_VARIABLE,
    Attach,
    Attached,
    Detach,
    Detached,
    Introduced,
    LauncherChannel,
    Lines,
    encode_line,
    open_channel,
)
from tests.unit.examples import examples

FIRST, SECOND = {"RANK": "1"}, {"RANK": "2"}


class Launcher:
    """The other end."""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.channel = LauncherChannel(self.theirs)

    def say(self, *messages: Attach | Detach) -> None:
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
    channel.send(Detached(EXIT_TRANSPORT))
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
        launcher.channel.send(Introduced())

    @pytest.mark.parametrize(
        "garbage",
        [b"\n", b"{}\n", b"\xff\n", b'{"type":"detached","exit_code":0}\n', b'{"type":"attach","environment":{"A":1}}\n'],
    )
    def test_garbage_counts_as_that(self, garbage: bytes, launcher: Launcher) -> None:
        launcher.connection.sendall(garbage)
        launcher.say(Attach(FIRST))
        assert launcher.channel.wait() is None


def test_the_launcher_reads_what_the_worker_says(launcher: Launcher) -> None:
    said = [Introduced(), Attached('{"NCCL_DEBUG": "INFO"}'), Detached(71)]
    for message in said:
        launcher.channel.send(message)
    assert Lines(Introduced | Attached | Detached).feed(launcher.connection.recv(1 << 16)) == said


def test_a_variable_may_hold_anything_that_an_environment_holds(launcher: Launcher) -> None:
    given = {"A": "line\nbreak", "B": "", "C": 'quote " \\', "Ü": "é\u2028", "D": "x" * 300_000}
    launcher.say(Attach(given))
    assert launcher.channel.wait() == given


@pytest.mark.parametrize("value", [None, "", "x", "-1"])
def test_without_a_launcher_there_is_no_channel(value: str | None) -> None:
    assert open_channel({} if value is None else {CHANNEL_VARIABLE: value}) is None


def test_the_descriptor_is_taken_over_and_goes_to_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    monkeypatch.setattr(module, "LauncherChannel", made.append)
    ours, theirs = socket.socketpair()
    with ours:
        descriptor = theirs.detach()
        os.set_inheritable(descriptor, True)
        open_channel({CHANNEL_VARIABLE: str(descriptor)})
        (connection,) = made
        with connection:
            assert not connection.get_inheritable()
            ours.sendall(b"x")
            assert connection.recv(9) == b"x"
