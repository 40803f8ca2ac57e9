"""The snapshots of a run that this host holds in memory, as `ls` shows them."""

import os
from collections import defaultdict
from collections.abc import Sequence

from elastictrain.checkpoint.commands.rows import Row, State
from elastictrain.checkpoint.memory.inventory import Held, look
from elastictrain.checkpoint.memory.place import is_private, run_folder, run_name

DEFAULT_MEMORY_DIR = "/dev/shm"  # noqa: S108  # the default of `checkpoint.memory_dir`


def find_in_memory(run_url: str, *, memory_dir: str) -> Sequence[Row]:
    """One row for each step that some rank's whole snapshot is of, newest first. Reads headers only."""
    folder = run_folder(memory_dir, run_url)
    steps: dict[tuple[int, str, int], list[Held]] = defaultdict(list)
    for held in look(folder, host=0) if is_private(folder) else ():
        if held.facts.run == run_name(run_url):
            steps[(held.facts.step, held.facts.incarnation, held.facts.world_size)].append(held)
    return [_row(folder, step, world_size, of_step) for (step, _, world_size), of_step in sorted(steps.items(), reverse=True)]


def _row(folder: str, step: int, world_size: int, held: Sequence[Held]) -> Row:
    missing = sorted(set(range(world_size)) - {one.facts.rank for one in held})
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    created = min(one.facts.created for one in held)
    return Row(
        name=f"snapshot of step {step}",
        step=step,
        tier="memory" if not all(one.replica for one in held) else "replica",
        state=State.PARTIAL if missing else State.VALID,
        reason=f"rank{'s' if len(missing) > 1 else ''} {named} not on this host" if missing else "",
        created=created,
        modified=created,
        size_bytes=sum(os.stat(f"{folder}/{one.slot}").st_size for one in held),  # noqa: PTH116
        world_size=world_size,
        num_files=len(held),
    )
