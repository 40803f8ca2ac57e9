"""The group `checkpoint`: when state is saved, how much is kept, what to do with bad ones."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import NonEmpty, Range


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """When state is saved, how much is kept, and what to do with what is damaged."""

    every_steps: Annotated[int, Range(0)] = 100
    """Optimizer steps between checkpoints; 0 for none by step."""

    every_minutes: Annotated[float, Range(0.0)] = 0.0
    """Minutes between checkpoints, in addition; 0 for none by time."""

    snapshot_every_steps: Annotated[int, Range(0)] = 10
    """Optimizer steps between snapshots in host memory, from which a restarted worker goes on; 0 for none but those that
    are on their way to storage."""

    buffers: Annotated[int, Range(0, 3)] = 2
    """Snapshots of each rank that host memory has room for; fewer where it has not. 0 keeps none: checkpoints are then written
    while training waits."""

    memory_dir: Annotated[str, NonEmpty()] = "/dev/shm"  # noqa: S108  # the folder in it is private, and checked
    """Folder in host memory (a tmpfs) for snapshots; each user and run gets a folder of its own in it."""

    replicate: bool = True
    """Keep each host's newest snapshot on another host, too; without effect on one host."""

    keep_last: Annotated[int, Range(1)] = 3
    """Newest valid checkpoints that are kept."""

    keep_every: Annotated[int, Range(0)] = 0
    """Checkpoints at multiples of this step are kept for good; 0 for none."""

    on_invalid: Literal["stop", "fresh"] = "stop"
    """When checkpoint remnants exist and none is valid: stop with an error, or start over from step 0."""

    max_failed_saves: Annotated[int, Range(1)] = 3
    """Failed saves in a row after which the run stops."""

    key_env: str = ""
    """Environment variable that holds a secret of at least 32 bytes: manifests are signed with it, and nothing that is not is
    restored from storage. Empty for none."""

    shard_mb: Annotated[float, Range(1.0)] = 4096.0
    """Size at which a rank begins another shard file (2^20 bytes)."""
