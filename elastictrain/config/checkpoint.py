"""The group `checkpoint`: when state is saved, how much is kept, what to do with bad ones."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """When state is saved, how much is kept, and what to do with what is damaged."""

    every_steps: Annotated[int, Range(0)] = 100
    """Optimizer steps between checkpoints; 0 for none by step."""

    every_minutes: Annotated[float, Range(0.0)] = 0.0
    """Minutes between checkpoints, in addition; 0 for none by time."""

    keep_last: Annotated[int, Range(1)] = 3
    """Newest valid checkpoints that are kept."""

    keep_every: Annotated[int, Range(0)] = 0
    """Checkpoints at multiples of this step are kept for good; 0 for none."""

    on_invalid: Literal["stop", "fresh"] = "stop"
    """When checkpoint remnants exist and none is valid: stop with an error, or start over from step 0."""

    max_failed_saves: Annotated[int, Range(1)] = 3
    """Failed saves in a row after which the run stops."""

    shard_mb: Annotated[float, Range(1.0)] = 4096.0
    """Size at which a rank begins another shard file (2^20 bytes)."""
