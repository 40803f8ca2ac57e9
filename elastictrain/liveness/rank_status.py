"""Where one rank of the group stands, as it travels in its heartbeats. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.liveness.progress import Phase, ProgressMark

_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank, as another one sees it. `silent_s`: since its phase began. `still_s`: since its last heartbeat, at least."""

    rank: int
    host: str
    mark: ProgressMark
    silent_s: float
    bound_s: float
    still_s: float = 0.0
    sequences: Mapping[str, int] | None = None
    """Of each process group: the number of the last collective that it entered; None if it did not tell."""

    collective: str = ""
    """The last collective that it entered."""

    @property
    def name(self) -> str:
        """`rank 3 on host b`"""
        return f"rank {self.rank} on {self.host}"


def to_heartbeat(mark: ProgressMark, *, now_s: float, bound_s: float) -> dict[str, object]:
    """What a rank writes of itself; JSON."""
    return {
        "where": str(mark),
        "phase": str(mark.phase),
        "step": mark.step,
        "micro_batch": mark.micro_batch,
        "first_step_done": mark.first_step_done,
        "silent_s": round(max(0.0, now_s - mark.since_s), 3),
        "bound_s": bound_s,
    }


def from_heartbeat(beat: Mapping[str, object], *, rank: int, host: str, still_s: float) -> RankStatus | None:
    """The inverse; None if another release, or nobody of ours, has written it."""
    try:
        silent_s, bound_s = _number(beat["silent_s"]), _number(beat["bound_s"])
        mark = ProgressMark(
            Phase(str(beat["phase"])), int(_number(beat["step"])), int(_number(beat["micro_batch"])), 0.0,
            bool(beat["first_step_done"]),
        )  # fmt: skip
        sequences = beat.get("sequences")
        told = {str(group): int(_number(last)) for group, last in sequences.items()} if isinstance(sequences, Mapping) else None
    except (KeyError, ValueError, TypeError):
        return None
    collective = str(beat.get("collective", ""))[:_LONGEST_TEXT]
    return RankStatus(rank, host, mark, silent_s + still_s, bound_s, still_s, told, collective)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
