"""Ranks as threads that take turns: every access to the shared store is a point at which another one may go on, or one dies."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastictrain.distributed.generation import AgreedGeneration, Introduction, agree
from elastictrain.errors import ElasticTrainError
from elastictrain.identity import Identity

TIMEOUT_S = 3.0


def introduction_of(rank: int) -> Introduction:
    """What a rank on the stage tells of itself."""
    return Introduction(f"host-{rank}", 1 + rank, "gloo", f"digest {rank % 2}", pid=70 + rank, stayed=rank > 0)


class Killed(BaseException):
    """What a killed rank's thread raises to end."""


@dataclass
class Actor:
    """One process that takes part."""

    identity: Identity
    result: AgreedGeneration | None = None
    error: ElasticTrainError | None = None
    alive: bool = True
    killed: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Stage:
    """Runs `agree` for many ranks in an order drawn from `seed`."""

    def __init__(self, seed: int, *, data: dict[str, bytes] | None = None) -> None:
        self.random = random.Random(seed)
        self.data = data if data is not None else {}
        self.actors: list[Actor] = []
        self._back = threading.Semaphore(0)
        self._now_s = 0.0
        self._current: Actor | None = None

    def enter(self, rank: int, *, world_size: int, number: int = 1, poll: Callable[[], None] = lambda: None) -> Actor:
        """A process of this rank begins."""
        actor = Actor(Identity(rank, world_size, 0, 1, f"host-{rank}", launched=True))
        self.actors.append(actor)

        def live() -> None:
            actor.turn.acquire()
            try:
                if not actor.killed:
                    actor.result = agree(
                        self,
                        actor.identity,
                        introduction_of(rank),
                        number=number,
                        timeout_s=TIMEOUT_S,
                        poll=poll,
                        clock=lambda: self._now_s,
                        sleep=self._sleep,
                    )
            except Killed:
                pass
            except ElasticTrainError as error:
                actor.error = error
            finally:
                actor.alive = False
                self._back.release()

        threading.Thread(target=live, daemon=True).start()
        return actor

    def play(self, *, turns: int | None = None) -> None:
        """Let ranks go on, one turn each time, until all have ended, or for `turns`."""
        while turns is None or turns > 0:
            alive = [actor for actor in self.actors if actor.alive]
            if not alive:
                return
            self._go_on(self.random.choice(alive))
            turns = None if turns is None else turns - 1

    def kill(self, actor: Actor) -> None:
        """SIGKILL: it does nothing any more."""
        actor.killed = True
        if actor.alive:
            self._go_on(actor)

    def _go_on(self, actor: Actor) -> None:
        self._current = actor
        actor.turn.release()
        self._back.acquire()

    def _pause(self) -> None:
        actor = self._current
        assert actor is not None
        self._back.release()
        actor.turn.acquire()
        if actor.killed:
            raise Killed

    def _sleep(self, seconds: float) -> None:
        self._now_s += seconds / max(1, sum(actor.alive for actor in self.actors))
        self._pause()

    def set(self, key: str, value: str | bytes, /) -> None:
        self._pause()
        self.data[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str, /) -> bytes:
        self._pause()
        return self.data[key]

    def check(self, keys: list[str], /) -> bool:
        self._pause()
        return all(key in self.data for key in keys)
