"""A part of the checks, done by all ranks at once: entered, run under its deadline, and judged where ranks are missing."""

import os
import time
from collections.abc import Callable, Sequence

import torch

from elastictrain.distributed.group import Group
from elastictrain.identity import Identity
from elastictrain.preflight.group.attendance import Act, Attendance, DeadlineThread, Entries
from elastictrain.preflight.group.judge_attendance import judge_attendance
from elastictrain.preflight.group.measurements import free_memory
from elastictrain.preflight.group.members import GroupMember, Known, introduced, strangers
from elastictrain.preflight.surroundings import Exchange
from elastictrain.preflight.verdict import Verdict


class GroupCheckRunner:
    """One rank's side. After a part that not all came through, nothing further may be run."""

    def __init__(
        self,
        group: Group,
        exchange: Exchange,
        identity: Identity,
        *,
        hosts: Sequence[str],
        grace_s: float,
        on_part: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group = group
        self.identity = identity
        self.members: tuple[GroupMember, ...] = strangers(hosts)
        self.culprits: list[Verdict] = []
        """Who is to blame that the checks ended early."""

        self._on_part = on_part
        self._clock = clock
        self._entries = Entries(exchange, rank=identity.rank, world_size=identity.world_size, grace_s=grace_s, clock=clock)
        self._lane = DeadlineThread(self._take_device)

    def introduce(self, known: Known, *, limit_s: float) -> Attendance | None:
        """The first part: every rank says that it is there. As for `run`."""

        def act(_: Callable[[str], None]) -> object:
            return self._introduction(known)

        return self.run("present", "present", act, limit_s=limit_s)

    def run(self, check: str, part: str, act: Act, *, limit_s: float) -> Attendance | None:
        """What all ranks brought back; None if not all came through.

        Collective: yes. Returns a little after `limit_s` at the latest. Raises: TransportError if the exchange cannot be
        reached.
        """
        self._on_part(part)
        began = self._clock()
        self._entries.enter(part)
        word = self._lane.run(act, limit_s=limit_s)
        attendance = self._entries.settle(part, word, began=began, limit_s=limit_s)
        if check == "present":
            self.members = introduced(self.members, {rank: one.figure for rank, one in attendance.words.items()})
        if attendance.complete:
            return attendance
        self.culprits += judge_attendance(check, attendance, self.members)
        return None

    def close(self) -> None:
        """Nothing further is run; what the checks took of the device's memory is given back."""
        self._lane.close()
        if self.group.device.type == "cuda" and not self.culprits:
            torch.cuda.empty_cache()

    def _introduction(self, known: Known) -> dict[str, object]:
        device = self.group.device
        return {
            "rank": self.identity.rank,
            "host": self.members[self.identity.rank].host,
            "local_rank": self.identity.local_rank,
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "free_bytes": free_memory(device, local_world_size=self.identity.local_world_size),
            "network_gbps": known.network_gbps,
            "planned": known.planned,
        }

    def _take_device(self) -> None:
        # The current device is each thread's own.
        if self.group.device.type == "cuda":
            torch.cuda.set_device(self.group.device)
