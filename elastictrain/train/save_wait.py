"""Waits for a save that cannot be put off, in rounds: each rank says how far it is, and all decide alike."""

import time
from collections.abc import Callable
from dataclasses import asdict

from elastictrain.checkpoint.exchange import gather_json
from elastictrain.checkpoint.manifest import JsonValue
from elastictrain.checkpoint.saver.link import SaverLink
from elastictrain.checkpoint.saver.pending_saves import Saved
from elastictrain.fault.exits import WaitNotice, describe_process
from elastictrain.train.leaving import LeaveDecision, SaveStatus, judge, least
from elastictrain.train.saving import SavingParts, tell_failure

_ROUND_S = 0.1
SHARE = 0.9
"""Of the limit of a phase: what is waited for in it gives up before the watchdog does."""


class SaveWait:
    """What this rank knows of saves that are on their way to storage."""

    def __init__(self, parts: SavingParts, link: SaverLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._link = link
        self._clock = clock
        self.saved_step = -1
        """The newest step that the keeper has committed; rank 0 alone knows."""

    def note(self, saved: list[Saved]) -> None:
        """As rank 0: these were committed."""
        if saved:
            self.saved_step = max(self.saved_step, *(one.step for one in saved))
            self._parts.committed(self.saved_step)

    def until_safe(self, step: int, *, can_replicate: bool, in_a_row: int, deadline_s: float) -> LeaveDecision:
        """Until a step whose snapshot is whole on all ranks is in storage, has failed to get there, or this run has to go.

        If it has to go soon, and `can_replicate`, the step is sent to the peers as well. `in_a_row`: saves that have failed;
        `deadline_s`: monotonic.
        Collective: yes.
        """
        replicating = False
        notice = WaitNotice(self._parts.say, clock=self._clock)
        while True:
            words = self._hear_all(step, deadline_s=deadline_s, in_a_row=in_a_row)
            verdict = judge(words, replicating=replicating)
            if verdict is not None:
                return verdict
            left = least([word.left_s for word in words])
            if can_replicate and not replicating and left is not None:
                # Nobody trains any more, so nobody is slowed down.
                self._link.replicate(on=True, unpaced=True)
                self._link.send(step)
                replicating = True
            if self._parts.rank == 0:
                until_s = deadline_s if left is None else min(deadline_s, self._clock() + left)
                notice.tell(lambda: self._describe(step), until_s=until_s)
                self._link.wait_for_news(_ROUND_S)

    def _describe(self, step: int) -> str:
        """What is waited for."""
        return f"the saver ({describe_process(self._link.pid)}) to write step {step} from host memory to storage"

    def _hear_all(self, step: int, *, deadline_s: float, in_a_row: int) -> list[SaveStatus]:
        sending, unsent = self._link.sending()
        # A host without a keeper writes nothing, and the first host would wait for it until its limit.
        saved, error = False, self._link.broken
        if self._parts.rank == 0:
            saved, error = self._ask_keeper(step, in_a_row=in_a_row)
            if not saved and not error and self._clock() >= deadline_s:
                error = f"it was not durable within {self._parts.save_timeout_s:g} s"
        own = SaveStatus(self._parts.left_s(), sending, unsent, saved, error)
        return [_word(row) for row in gather_json(asdict(own), group=self._parts.group)]

    def _ask_keeper(self, step: int, *, in_a_row: int) -> tuple[bool, str]:
        """Whether a step is in storage by now, or why it will not be."""
        self.note(self._link.take_saved())
        if self.saved_step >= step:
            return True, ""
        for failure in self._link.take_failures():
            if failure.step == step:
                return False, failure.error
            tell_failure(self._parts, failure.step, error=failure.error, in_a_row=in_a_row + 1)
        return False, ""


def _word(row: JsonValue) -> SaveStatus:
    assert isinstance(row, dict)  # noqa: S101
    left = row["left_s"]
    return SaveStatus(
        float(left) if isinstance(left, int | float) else None,
        sending=bool(row["sending"]),
        unsent=bool(row["unsent"]),
        saved=bool(row["saved"]),
        error=str(row["error"]),
    )
