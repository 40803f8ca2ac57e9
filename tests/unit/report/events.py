"""Event files of runs that never took place."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.report.history import EventReader, History
from elastictrain.storage.opening import open_store


@dataclass
class Written:
    """Lines by object, as a run writes them. Times are seconds since a moment of 2026."""

    lines: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    zero: float = 1_790_000_000.0

    def rank(self, time: float, generation: int, event: str, *, rank: int = 0, **fields: object) -> None:
        name = f"{generation:06d}-0a1b2c3d"
        self._write(f"events/{name}-r{rank:05d}.jsonl", time, name, rank, event, fields)

    def launcher(self, time: float, name: str, generation: int, event: str, **fields: object) -> None:
        self._write(f"events/launcher-{name}.jsonl", time, f"generation-{generation}", -1, event, fields)

    def step(self, time: float, generation: int, step: int, **fields: object) -> None:
        given = {"loss": 1.0 / step, "positions": [4 * step - 4, 4 * step], "samples_per_s": 4.0, "tokens_per_s": 40.0}
        self.rank(time, generation, "step", step=step, **{**given, **fields})

    def begin(self, time: float, host: str, generation: int, world_size: int, hosts: tuple[str, ...]) -> None:
        self.launcher(time, host, generation, "generation", hosts=hosts, world_size=world_size, reason="", pause_s=0)

    def end(self, time: float, host: str, generation: int, kind: str, **fields: object) -> None:
        given = {"exit_code": 137 if kind == "failed" else 71 if kind == "lost" else 75, "phase": "", "step": 0, "lost": ""}
        self.launcher(time, host, generation, "generation_ended", kind=kind, **{**given, "reason": kind, **fields})

    def start(self, time: float, generation: int, world_size: int, hosts: tuple[str, ...], **seconds: float) -> None:
        self.rank(time, generation, "start", world_size=world_size, hosts=hosts, device="cpu", seconds=seconds)

    def history(self) -> History:
        history = History()
        for key, lines in sorted(self.lines.items()):
            history.add(key, b"".join(lines))
        return history

    def save(self, folder: Path) -> EventReader:
        for key, lines in self.lines.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(b"".join(lines))
        return EventReader(open_store(str(folder)))

    def _write(self, key: str, time: float, name: str, rank: int, event: str, fields: dict[str, object]) -> None:
        row = {"time": self.zero + time, "event": event, "incarnation": name, "rank": rank, **fields}
        self.lines[key].append(json.dumps(row).encode() + b"\n")


def undisturbed() -> Written:
    """One worker without a launcher: 10 s of start, 3 s to the first step, steps of 1 s, an evaluation, a save, and the end."""
    run = Written()
    run.start(10.0, 1, 1, ("a",), process=4.0, rendezvous=1.0, preflight=3.0, build=2.0)
    run.rank(12.0, 1, "resume", step=0, tier="none")
    run.rank(15.0, 1, "first_step", step=1, seconds={"process": 4.0, "preflight_group": 8.25, "first_step": 2.75})
    run.step(15.0, 1, 1)
    run.step(16.0, 1, 2)
    run.step(17.0, 1, 3, waits={"data": 0.25})
    run.rank(19.0, 1, "eval", step=3, loss=0.5, seconds=2.0)
    run.step(20.0, 1, 4)
    run.step(23.0, 1, 5, waits={"save": 2.0})
    run.rank(25.0, 1, "stop", step=5, reason="done", exit_code=0, saved="storage", saved_step=5)
    return run


def killed() -> Written:
    """Two workers of one host; one is killed after step 4, and step 4 is repeated."""
    run = Written()
    run.launcher(0.0, "a-1", 0, "launcher_started", launcher="a-1", host="a", processes=2)
    run.begin(2.0, "a-1", 1, 2, ("a",))
    run.start(8.0, 1, 2, ("a",), rendezvous=1.0, preflight=2.0)
    run.rank(9.0, 1, "resume", step=0, tier="none")
    for step in range(1, 5):
        run.step(9.0 + step, 1, step)
    run.rank(13.5, 1, "failure", exit_code=71, error="a collective failed", phase="backward", step=5)
    run.end(14.0, "a-1", 1, "failed", died=["rank 1 on a"], reason="local rank 1 was ended by SIGKILL")
    run.begin(14.5, "a-1", 2, 2, ("a",))
    run.start(15.0, 2, 2, ("a",), group=0.25)
    run.rank(15.5, 2, "resume", step=3, tier="memory")
    run.step(17.5, 2, 4)
    run.rank(17.5, 2, "recovery", rung="in_place", reason="local rank 1 was ended by SIGKILL", lost=["rank 1 on a"], seconds={})
    run.step(18.5, 2, 5)
    run.step(19.5, 2, 6)
    run.rank(20.0, 2, "stop", step=6, reason="SIGTERM", exit_code=75, saved="storage", saved_step=6)
    run.end(20.5, "a-1", 2, "leaving")
    run.launcher(20.5, "a-1", 2, "launcher_ended", exit_code=75, reason="asked to stop (SIGTERM)")
    return run


def lost_host(*, clock_off: float = 0.0) -> Written:
    """Two hosts of one worker; b is lost after step 3, and comes back as another launcher. b's clock may be wrong."""
    run = Written()
    run.launcher(0.0, "a-1", 0, "launcher_started", launcher="a-1", host="a", processes=1)
    run.launcher(1.0 + clock_off, "b-2", 0, "launcher_started", launcher="b-2", host="b", processes=1)
    run.begin(2.0, "a-1", 1, 2, ("a", "b"))
    run.begin(2.0 + clock_off, "b-2", 1, 2, ("a", "b"))
    run.start(4.0, 1, 2, ("a", "b"), rendezvous=1.0)
    run.rank(5.0, 1, "resume", step=0, tier="none")
    for step in range(1, 4):
        run.step(5.0 + step, 1, step)
    run.end(12.0, "a-1", 1, "lost", lost="b-2", died=["b"], reason="b is silent")
    run.begin(13.0, "a-1", 2, 1, ("a",))
    run.start(14.0, 2, 1, ("a",))
    run.rank(14.0, 2, "resume", step=3, tier="memory")
    for step in range(4, 7):
        run.step(11.0 + step, 2, step)
    run.launcher(16.0 + clock_off, "b-3", 0, "launcher_started", launcher="b-3", host="b", processes=1)
    run.end(18.0, "a-1", 2, "grow")
    run.begin(19.0, "a-1", 3, 2, ("a", "b"))
    run.begin(19.0 + clock_off, "b-3", 3, 2, ("a", "b"))
    run.start(20.0, 3, 2, ("a", "b"))
    run.rank(20.0, 3, "resume", step=6, tier="memory")
    for step in range(7, 10):
        run.step(14.0 + step, 3, step)
    run.end(24.0, "a-1", 3, "done")
    run.end(24.0 + clock_off, "b-3", 3, "done")
    return run


COLLECTIVE: Mapping[str, object] = {
    "kind": "size",
    "group": "ddp",
    "sequence": 7,
    "culprits": ["rank 1 on a"],
    "others": ["rank 0 on a"],
    "calls": {"rank 0 on a": "all_reduce([4])", "rank 1 on a": "all_reduce([8])"},
    "text": "rank 1 on a called all_reduce([8]) as no. 7 of group ddp, where rank 0 on a called all_reduce([4]): another size",
}


def mismatch(*guilty: str, **changes: object) -> Written:
    """`killed`, with a hang before in which flight recorders differ; two ranks record it."""
    run = killed()
    for rank in range(2):
        text = f"hang: it waits. {COLLECTIVE['text']}"
        run.rank(13.25, 1, "hang", rank=rank, guilty=guilty, hosts=[], reason="mismatch", text=text)
        run.rank(13.25, 1, "collective_fault", rank=rank, **{**COLLECTIVE, **changes})
    return run
