"""The group `run`: which run this is."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import NonEmpty, Range


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Which run this is, and what makes it the same run again."""

    dir: Annotated[str, NonEmpty()]
    """Folder of the run: a path or any fsspec URL (s3://bucket/name). The same folder continues the same run."""

    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Everything random derives from it together with step and position."""

    on_change: Literal["stop", "continue"] = "stop"
    """What to do on resume when a key that changes the answer (seed, data, global batch, model) is not what the stored config
    says."""

    on_held: Literal["stop", "wait"] = "stop"
    """What to do where another run trains in `dir`: end with exit code 75, or wait until that one has ended. One that gives no
    sign of life for 20 s counts as ended."""

    deterministic: bool = False
    """Ask torch for deterministic algorithms: a CUDA run is then repeatable bit for bit, at some cost in speed."""

    num_threads: Annotated[int, Range(1, 1024)] = 1
    """CPU threads per rank for torch's operators. It changes the bits of CPU arithmetic, so it is part of the run."""
