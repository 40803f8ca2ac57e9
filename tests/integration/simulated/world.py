"""Hosts, their storage, their network and what they train, under a plan of faults; checks after every second what must hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from elastictrain.config.composed import LaunchGroup
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.records import Generation
from tests.integration.simulated.commits import Commit, Made, Resume, Stale, is_stale
from tests.integration.simulated.launcher import Clock, Decide, Launcher
from tests.integration.simulated.storage import Storage, Weather

STORM = Weather(late=0.3, longest_lag_s=4.0, failing=0.1, lost=0.05, torn=0.1)
_MOST_SUPERSEDED_TICKS = 3
_COMMIT_EVERY = 3
_BREAKS = 0.05
_LOSES = 0.1
"""Datagrams that do not arrive."""


@dataclass(slots=True)
class Group:
    """The workers of one generation, wherever they run."""

    generation: Generation
    parent: Made | None = None
    chosen: bool = False
    resumed: bool = False
    step: int = 0
    stop_in: int = -1
    began: set[str] = field(default_factory=set)


class BrokenPromiseError(Exception):
    pass


class World:
    def __init__(
        self,
        names: str,
        *,
        seed: int,
        options: LaunchGroup,
        total_steps: int = 10**9,
        expected_hosts: int = 0,
        atomic: bool = True,
        decide_by: Decide = decide,
        stale: Stale = is_stale,
    ) -> None:
        self.random = Random(seed)
        self.options, self.total_steps, self._decide, self._stale = options, total_steps, decide_by, stale
        self._expected_hosts = expected_hosts
        self.storage = Storage(self.random, atomic=atomic)
        self.now_s = 0.0
        self.launchers: dict[str, Launcher] = {}
        self.all: dict[str, Launcher] = {}
        self.cut_off: set[str] = set()
        self.unheard: set[frozenset[str]] = set()
        self.deaf: set[tuple[str, str]] = set()
        """Hosts and whom they do not hear, though those may hear them."""

        self.names = names
        self.clocks = {name: Clock(self.random.uniform(0, 1e6), self.random.uniform(0.85, 1.2)) for name in names}
        self.groups: dict[int, Group] = {}
        self.commits: list[tuple[float, Made]] = []
        self.in_flight: list[tuple[float, Made | Resume]] = []
        self.resumes: list[tuple[float, Resume]] = []
        self.committers: list[int] = []
        """The generation of each commit, in the order in which they were sent off."""

        self._written = False
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        if name in self.launchers and self.launchers[name].live:
            return
        host = f"{name}{len(self.all)}"
        self.launchers[name] = self.all[host] = Launcher(
            name,
            host,
            clock=self.clocks[name],
            storage=self.storage,
            options=self.options,
            expected_hosts=self._expected_hosts,
            decide=self._decide,
            committed_step=self.committed_step,
        )

    def kill(self, name: str, *, silently: bool) -> None:
        launcher = self.launchers[name]
        launcher.gone, launcher.silent_death = True, silently

    def live(self) -> list[Launcher]:
        return [launcher for launcher in self.launchers.values() if launcher.live]

    def newest(self) -> Generation | None:
        return self.storage.generations.get(max(self.storage.generations.rows, default=0), as_of_s=self.now_s)

    def created_s(self, generation: Generation) -> float:
        """When a generation was proposed."""
        return self.storage.generations.rows[generation.number][0][0]

    def tick(self) -> None:
        self.now_s += 1.0
        turn = self.live()
        self.random.shuffle(turn)
        for launcher in turn:
            if not launcher.frozen:
                heard = [host for host in self.all if self._hears(launcher, host)]
                lines = [line for host in heard if (line := self.all[host].told) is not None and self.random.random() >= _LOSES]
                launcher.listen(heard, lines, now_s=self.now_s)
                launcher.tick(now_s=self.now_s, cut_off=launcher.name in self.cut_off)
        self._train()
        self._land()
        self._check()

    def _hears(self, by: Launcher, host: str) -> bool:
        other = self.all[host]
        is_log_rank = other.live and not other.frozen and other is not by
        return is_log_rank and self._reaches(other, by)

    def _reaches(self, sender: Launcher, receiver: Launcher) -> bool:
        return self._passes(sender.name, receiver.name)

    def _passes(self, sender: str, receiver: str) -> bool:
        return frozenset((sender, receiver)) not in self.unheard and (receiver, sender) not in self.deaf

    def connected(self, names: Sequence[str]) -> bool:
        """Whether each of these hosts reaches each."""
        return all(self._passes(one, other) for one in names for other in names if one != other)

    def _train(self) -> None:
        for launcher in list(self.all.values()):
            if launcher.live and launcher.attempt is not None and launcher.attempt.started:
                generation = launcher.attempt.generation
                self.groups.setdefault(generation.number, Group(generation)).began.add(launcher.host)
        for group in self.groups.values():
            self._go_on(group)

    def _at_work(self, host: str, group: Group) -> bool:
        launcher = self.all[host]
        attempt = launcher.attempt
        return launcher.live and attempt is not None and attempt.started and attempt.generation == group.generation

    def _go_on(self, group: Group) -> None:
        hosts = [member.host for member in group.generation.members]
        at_work = [self.all[host] for host in hosts if self._at_work(host, group)]
        if not at_work:
            return
        if len(at_work) < len(hosts):
            closed = [self.all[host] for host in sorted(group.began) if not self._at_work(host, group)]
            for launcher in at_work:
                if not launcher.frozen and self.random.random() < 0.7 and self._notices(launcher, closed):
                    launcher.workers_end(71, now_s=self.now_s)
            return
        if any(launcher.frozen == "host" for launcher in at_work):
            return
        if not self.connected([launcher.name for launcher in at_work]):
            # Collectives hang, and now and then a connection breaks.
            for launcher in at_work:
                if not launcher.frozen and self.random.random() < _BREAKS:
                    launcher.workers_end(71, now_s=self.now_s)
            return
        if (
            any(launcher.attempt is not None and launcher.attempt.asked is not None for launcher in at_work)
            and group.stop_in < 0
        ):
            group.stop_in = 2
        if group.stop_in == 0:
            self._commit(group)
            for launcher in at_work:
                launcher.workers_end(75, now_s=self.now_s)
            return
        group.stop_in -= group.stop_in > 0
        self._step(group, at_work)

    def _notices(self, launcher: Launcher, closed: Iterable[Launcher]) -> bool:
        """Whether workers learn that others are gone: not if their host vanished without a sign, or cannot be reached."""
        return any(not other.silent_death and self._reaches(other, launcher) for other in closed)

    def _step(self, group: Group, at_work: list[Launcher]) -> None:
        if not group.chosen and group.generation.members[0].name not in self.cut_off:
            group.chosen, group.parent = True, self._choose()
            group.step = 0 if group.parent is None else group.parent.commit.step
            parent = 0 if group.parent is None else group.parent.commit.generation
            self._send(Resume(group.generation.number, group.step, parent))
        if not group.resumed:
            return
        group.step += 1
        if group.step % _COMMIT_EVERY == 0 or group.step >= self.total_steps:
            self._commit(group)
        if group.step >= self.total_steps:
            for launcher in at_work:
                launcher.workers_end(0, now_s=self.now_s)

    def _choose(self) -> Made | None:
        """The newest commit that is not stale, as far as lists show it."""
        seen_s, records_s = self.storage.as_of(self.now_s), self.storage.as_of(self.now_s)
        resumes = [resume for written_s, resume in self.resumes if written_s <= records_s]
        made = [one for written_s, one in self.commits if written_s <= seen_s and not self._stale(one.commit, resumes)]
        return max(made, key=lambda one: one.commit.step, default=None)

    def committed_step(self) -> int:
        """What a start would go on from, as storage holds it."""
        resumes = [resume for _, resume in self.resumes]
        return max((made.commit.step for _, made in self.commits if not self._stale(made.commit, resumes)), default=0)

    def _commit(self, group: Group) -> None:
        if group.resumed and group.step > (0 if group.parent is None else group.parent.commit.step):
            self.committers.append(group.generation.number)
            self._send(Made(Commit(group.generation.number, group.step), group.parent))

    def _send(self, record: Made | Resume) -> None:
        self.in_flight.append((self.now_s + self.random.choice((0.0, 0.0, 1.0, 8.0)), record))

    def _land(self) -> None:
        """What was on its way arrives, even if its sender is dead by now."""
        for lands_s, record in list(self.in_flight):
            if lands_s > self.now_s:
                continue
            self.in_flight.remove((lands_s, record))
            self._written = True
            if isinstance(record, Resume):
                self.resumes.append((self.now_s, record))
                self.groups[record.generation].resumed = True
            elif all(record.commit != other.commit for _, other in self.commits):
                self.commits.append((self.now_s, record))

    def _check(self) -> None:
        for number, versions in self.storage.generations.rows.items():
            if len(versions) > 1:
                raise BrokenPromiseError(f"{len(versions)} generations {number}")
            if number > 1 and number - 1 not in self.storage.generations.rows:
                raise BrokenPromiseError(f"no generation {number - 1}")
        for launcher in self.live():
            attempt = launcher.attempt
            if attempt is None or launcher.frozen or launcher.newest is None:
                continue
            attempt.superseded_ticks += launcher.newest.number > attempt.generation.number
            if attempt.superseded_ticks > _MOST_SUPERSEDED_TICKS:
                raise BrokenPromiseError(f"{launcher.host} knows of {launcher.newest.number} and trains on")
        if self._written:
            self._written = False
            self._check_history()

    def _check_history(self) -> None:
        resumes = [resume for _, resume in self.resumes]
        history = [made for _, made in self.commits if not self._stale(made.commit, resumes)]
        newest = max(resumes, key=lambda resume: resume.generation, default=None)
        if newest is not None and newest.step and self._stale(Commit(newest.parent, newest.step), resumes):
            raise BrokenPromiseError(f"generation {newest.generation} stands on a commit that is stale")
        history.sort(key=lambda made: made.commit.step)
        for before, after in pairwise(history):
            if before.commit.step == after.commit.step or not after.stands_on(before):
                raise BrokenPromiseError(f"{after.commit} does not stand on {before.commit}")

    def trains_now(self) -> bool:
        """Whether the newest generation trains, and its hosts reach each other."""
        newest = self.newest()
        return newest is not None and self.trains() and self.connected([member.name for member in newest.members])

    def trains(self) -> bool:
        """Whether the newest generation is at work, whole, and has at least as many hosts as it must."""
        newest = self.newest()
        if newest is None or newest.terminal or newest.number not in self.groups:
            return False
        hosts = [member.host for member in newest.members]
        group = self.groups[newest.number]
        return len(hosts) >= self.options.min_hosts and group.resumed and all(self._at_work(host, group) for host in hosts)
