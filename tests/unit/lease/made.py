"""A run's storage with an owner, a clock that moves when it is waited, and what was said meanwhile."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from elastictrain.lease.chain import Chain, LeaseClaim
from elastictrain.lease.holder import Waiting
from elastictrain.lease.merge import EVENTS, parse_merged
from elastictrain.storage.store import Store
from tests.unit.checkpoint.fakes import FakeStore

DEAD = "boot.ns.1.2"


@dataclass
class Scene:
    store: FakeStore = field(default_factory=FakeStore)
    now_s: float = 0.0
    told: list[str] = field(default_factory=list)
    meanwhile: Callable[[float], None] = lambda _: None
    """Called with the time at each look."""

    @property
    def chain(self) -> Chain:
        return Chain(self.store)

    def waiting(self, on_held: Literal["stop", "wait"] = "stop") -> Waiting:
        return Waiting(
            on_held, "fake://run", self.told.append, lambda: self.meanwhile(self.now_s), lambda: self.now_s, self._sleep
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def hold(self, owner: str = "first", *, number: int = 1, beat: int = 1, gone: bool = False) -> LeaseClaim:
        claim = LeaseClaim(number, owner, "host1", 17, (owner,))
        assert self.chain.create(claim)
        self.beat(owner, beat, gone=gone)
        return claim

    def beat(self, owner: str, beat: int, *, gone: bool = False) -> None:
        self.chain.write_sign(owner, beat=beat, gone=gone, writers=())

    def launched(self, number: int = 1, *, outcome: str = "run", hosts: str = "ab") -> None:
        members = [{"host": host, "name": f"name-{host}"} for host in hosts]
        record = {"number": number, "outcome": outcome, "owner": "launch", "members": members}
        self.store.objects[f"launch/generations/{number:09d}.json"] = json.dumps(record).encode()

    def line(self, host: str, beat: int, state: str = "busy") -> None:
        self.store.objects[f"launch/hosts/{host}.json"] = json.dumps({"beat": beat, "state": state}).encode()


SECOND = LeaseClaim(0, "second", "host2", 18)


def read_events(store: Store) -> Iterator[bytes]:
    """All whole records of a run, each once, in reading order.

    A merge that was cut short leaves lines both in a journal and in the merged object.
    """
    lines = {
        info.key: [line for line in store.read(info.key).split(b"\n")[:-1] if line]
        for info in store.list(EVENTS)
        if info.key.endswith(".jsonl")
    }
    merged = {line for key, found in lines.items() if parse_merged(key) for line in found}
    for key, found in lines.items():
        yield from found if parse_merged(key) else (line for line in found if line not in merged)
