"""A run to log."""

from elastictrain.storage.store import Store
from elastictrain.telemetry.loggers import LoggedRun


def run_of(store: Store, *, first_step: int = 1, total_steps: int = 100, world_size: int = 1) -> LoggedRun:
    return LoggedRun(
        store=store,
        config={"run": {"seed": 1}, "train": {"steps": total_steps}},
        world_size=world_size,
        generation="000001-abcdef01",
        first_step=first_step,
        total_steps=total_steps,
        flush_s=0.01,
        close_s=10.0,
    )
