"""What an observer of a host may see."""

from elastictrain.liveness.progress import Phase, ProgressMark
from elastictrain.liveness.progress_file import RankProgress
from elastictrain.liveness.rank_monitor import ObservedRank


def marks(
    rank: int = 0,
    *,
    phase: Phase = Phase.REDUCE,
    step: int = 7,
    finished_step: int = 0,
    ending: bool = False,
    bound_s: float = 10.0,
    closed: bool = False,
) -> RankProgress:
    return RankProgress(
        pid=1000 + rank,
        rank=rank,
        stopped_s=8.0,
        grace_s=20.0,
        mark=ProgressMark(phase, step, 0, 0.0, True, finished_step=finished_step),
        bound_s=bound_s,
        limit_s=120.0,
        sequence=1,
        pulse=1,
        ending=ending,
        closed=closed,
    )


def seen(
    rank: int = 0,
    *,
    phase: Phase = Phase.REDUCE,
    step: int = 7,
    finished_step: int = 0,
    unchanged_s: float = 0.0,
    still_s: float = 0.0,
    stopped: bool = False,
    gone_s: float | None = None,
    ending: bool = False,
    closed: bool = False,
) -> ObservedRank:
    seen_marks = marks(rank, phase=phase, step=step, finished_step=finished_step, ending=ending, closed=closed)
    return ObservedRank(seen_marks, unchanged_s, still_s, stopped, gone_s)
