"""The launcher's thread for storage: a store that stalls must not keep the launcher from watching its workers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elastictrain.errors import StorageError
from elastictrain.launch.membership.records import End, Entry, Generation, HostState
from elastictrain.launch.membership.registry import Registry
from elastictrain.launch.membership.sight import Seen, outdated, see
from elastictrain.lease.records import BEAT_S
from elastictrain.storage.failures import reason_of
from elastictrain.storage.parallel import side_by_side

logger = logging.getLogger(__name__)

_HURRIED_S = 0.2
"""Interval while a group is forming: every look that is saved is time that nobody trains."""


@dataclass(frozen=True, slots=True)
class Known:
    """What storage said when it was read last. Times are monotonic."""

    began_s: float = 0.0
    """When storage was read for the first time."""

    read_s: float = float("-inf")
    """When the other hosts' lines were read last."""

    newest: Generation | None = None
    newest_since_s: float = 0.0
    follows_another: bool = False
    """Whether the generation before the newest one was not the last of a launch."""

    ends: Mapping[str, End] = field(default_factory=dict)
    ended_since_s: float | None = None
    seen: Mapping[str, Seen] = field(default_factory=dict)
    reads: int = 0
    """How often storage has been read; 0: nothing is known yet."""

    created: frozenset[int] = frozenset()
    """Numbers of generations that this host has tried to create."""

    trouble: str = ""
    """Why storage could not be read the last time; empty if it could."""


class Roster:
    """Writes this host's line, and reads those of the others."""

    def __init__(
        self,
        registry: Registry,
        entry: Entry,
        *,
        poll_s: float,
        lost_s: float,
        find_address: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find_address` is asked every `lost_s`, in the thread for storage; None: the one in `entry` stays."""
        self._registry = registry
        self._poll_s = poll_s
        self._lost_s = lost_s
        self._clock = clock
        self._entry = entry
        self._address = entry.address
        self._find_address = find_address
        self._found_s = clock()
        self._beat = 0
        self._written: Entry | None = None
        self._written_s = float("-inf")
        self.attentive = True
        """Whether the other hosts' lines are read; while it trains, only the first host of a group needs them."""

        self.hears: tuple[str, ...] = ()
        """Whom this host's watch hears, for its line."""

        self._posts: deque[Generation | End] = deque()
        self._hurried = False
        self._awake = threading.Event()
        self._closed = threading.Event()
        self._known = Known()
        self._thread = threading.Thread(target=self._run, name="roster", daemon=True)

    def start(self) -> None:
        """Begin to read and to write."""
        self._thread.start()

    def close(self, *, limit_s: float) -> None:
        """Write what is still to be written, as far as that is possible within `limit_s`."""
        self._closed.set()
        self._awake.set()
        self._thread.join(timeout=limit_s)

    @property
    def known(self) -> Known:
        """The latest reading."""
        return self._known

    @property
    def entry(self) -> Entry:
        """What this host says of itself."""
        return replace(self._entry, address=self._address)

    def say(
        self,
        state: HostState,
        *,
        reason: str = "",
        ended: int | None = None,
        master_port: int | None = None,
        committed_step: int | None = None,
    ) -> None:
        """Change this host's line; what is None stays as it is."""
        self._entry = replace(
            self._entry,
            state=state,
            reason=reason,
            ended=self._entry.ended if ended is None else ended,
            master_port=self._entry.master_port if master_port is None else master_port,
            committed_step=self._entry.committed_step if committed_step is None else committed_step,
        )
        self._awake.set()

    def post(self, record: Generation | End) -> None:
        """Have a generation created, or an end written, in the order of the calls and before a later change of the line.

        An end is written in any case. A generation is tried once, and may be asked for again: what is proposed then is newer.
        """
        waiting = [post.number for post in tuple(self._posts) if isinstance(post, Generation)]
        if not isinstance(record, Generation) or record.number not in waiting:
            self._posts.append(record)
        self._awake.set()

    def wake(self) -> None:
        """Read at once."""
        self._awake.set()

    def _run(self) -> None:
        while True:
            # In this order: what comes after it is either seen in this turn, or ends the wait after it.
            self._awake.clear()
            began_s = self._clock()
            last = self._closed.is_set()
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  # the edge of the thread: without it this host would wait for ever
                self._complain(str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {reason_of(error)}")
                if last:
                    return
                # Whoever cannot be answered asks again and again: storage is not to be asked as often.
                self._closed.wait(self._poll_s)
                continue
            self._known = replace(self._known, trouble="")
            if last and not self._posts:
                return
            forming = self._known.newest is None or self._known.newest.terminal or bool(self._known.ends)
            # Who is woken has been told that something has happened.
            pause_s = self._poll_s
            if forming:
                # From begin to begin: where storage is slow, one look follows another.
                pause_s = max(0.0, min(self._poll_s, _HURRIED_S) - (self._clock() - began_s))
            self._hurried = self._awake.wait(pause_s) or forming

    def _turn(self) -> None:
        """One look, in which nothing waits for anything else, however many hosts there are."""
        entries: list[Entry] | None = None
        ends: dict[str, End] = {}
        before, now_s = self._known, self._clock()

        def read_lines() -> None:
            nonlocal entries
            entries = self._registry.entries() if self.attentive else None

        def read_generations() -> None:
            self._learn(self._registry.newest(), now_s)

        def read_ends() -> None:
            nonlocal ends
            ends = self._ends_of(before.newest, before.ends)

        # Taken first: what it says of an end must not be read before the end itself, which was posted before it was said.
        self._look_for_address()
        entry = replace(self.entry, hears=self.hears)
        # What is posted from now on waits for the next turn: a proposal is not written beside reads.
        posts = tuple(self._posts)

        def write() -> None:
            self._write(entry, num_posts=len(posts))

        # What is read beside a change of the own line says nothing of that line. Of a proposal it has to be known who won.
        if any(isinstance(post, Generation) for post in posts):
            write()
            before = self._known
            side_by_side([read_generations, read_ends, read_lines])
        else:
            side_by_side([write, read_generations, read_ends, read_lines])
        newest = self._known.newest
        if newest != before.newest or before.reads == 0:
            ends = self._ends_of(newest, {})
        self._take_note(ends, entries, now_s)
        # Last: what is known by now is acted upon meanwhile.
        self._registry.settle()

    def _take_note(self, ends: Mapping[str, End], entries: list[Entry] | None, now_s: float) -> None:
        known, read_s = self._known, self._clock()
        ends = {**known.ends, **ends}
        since_s = known.ended_since_s if known.ended_since_s is not None or not ends else now_s
        if entries is not None:
            known = replace(known, seen=see(known.seen, entries, own=self._entry.host, now_s=read_s), read_s=read_s)
            there = {one.host for one in entries}
            for host in there.intersection(outdated(known.seen, now_s=read_s)):
                self._registry.forget(host)
        began_s = known.began_s if known.reads else now_s
        self._known = replace(known, began_s=began_s, ends=ends, ended_since_s=since_s, reads=known.reads + 1)

    def _learn(self, newest: Generation | None, now_s: float) -> None:
        """This is the newest generation now."""
        known = self._known
        if newest == known.newest and known.reads:
            return
        if newest is None:
            follows = False
        elif known.newest is not None and known.newest.number == newest.number - 1:
            follows = not known.newest.terminal
        else:
            follows = self._registry.follows_another(newest.number)
        self._known = replace(known, newest=newest, newest_since_s=now_s, follows_another=follows, ends={}, ended_since_s=None)

    def _ends_of(self, newest: Generation | None, known: Mapping[str, End]) -> dict[str, End]:
        if newest is None or newest.terminal:
            return {}
        # Asked for by name only where ends are likely: each is a request.
        expected = [member.host for member in newest.members] if self._hurried else []
        return self._registry.ends(newest.number, known=known, expected=expected)

    def _write(self, entry: Entry, *, num_posts: int) -> None:
        for _ in range(num_posts):
            self._write_post(self._posts[0])
            self._posts.popleft()
        self._write_entry(entry)

    def _look_for_address(self) -> None:
        if self._find_address is not None and self._clock() - self._found_s >= self._lost_s:
            self._address, self._found_s = self._find_address(), self._clock()

    def _write_post(self, post: Generation | End) -> None:
        if isinstance(post, End):
            self._registry.write_end(post)
            return
        try:
            won = self._registry.create(post)
        except Exception:
            # By the time that storage answers again, another generation may be due.
            self._posts.popleft()
            raise
        self._known = replace(self._known, created=self._known.created | {post.number})
        if won and self._known.reads:
            self._learn(post, self._clock())

    def _write_entry(self, entry: Entry) -> None:
        now_s = self._clock()
        # While it trains a host is watched in another way; its line is only there for those who come.
        interval_s = min(self._lost_s / 2, BEAT_S) if entry.state is HostState.BUSY else self._poll_s
        if entry == self._written and now_s - self._written_s < interval_s:
            return
        self._beat += 1
        self._registry.write_entry(replace(entry, beat=self._beat))
        self._written, self._written_s = entry, now_s

    def _complain(self, trouble: str) -> None:
        if trouble != self._known.trouble:
            logger.warning("the roster cannot be reached, and is tried again: %s", trouble)
        self._known = replace(self._known, trouble=trouble)
