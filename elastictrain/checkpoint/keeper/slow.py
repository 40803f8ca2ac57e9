"""Which save takes so long that a person is told of it."""

import logging

from elastictrain.checkpoint.keeper.jobs import SaveJob
from elastictrain.checkpoint.keeper.trouble import LastTrouble
from elastictrain.events import CheckpointSlow

SLOW_S = 20.0
"""A save that takes longer is told of; large ones on slow disks may."""


class SlowSaves:
    """Watches the save that is under way."""

    def __init__(self) -> None:
        self._told_step = -1
        self._trouble = LastTrouble()
        logging.getLogger("elastictrain.storage").addHandler(self._trouble)

    def look(self, under_way: tuple[SaveJob, float] | None) -> CheckpointSlow | None:
        """What is to be told of the job that is carried out since so many seconds, once for each; None: nothing."""
        if under_way is None:
            self._told_step = -1
            return None
        job, seconds = under_way
        if seconds < SLOW_S or self._told_step == job.step:
            return None
        self._told_step = job.step
        return CheckpointSlow(step=job.step, seconds=seconds, trouble=self._trouble.take())
