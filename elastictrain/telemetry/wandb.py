"""Weights & Biases."""

import logging
import os
import time
from typing import Any, Literal

from elastictrain.storage.local import LocalStore
from elastictrain.telemetry.loggers import LoggedRun, MetricPoint

logger = logging.getLogger(__name__)

_PREVIOUS_S = 60.0


class WandbLogger:
    """One W&B run for the whole run. W&B's environment variables count: WANDB_API_KEY, WANDB_MODE=offline, WANDB_DIR."""

    def __init__(
        self,
        *,
        project: str = "elastictrain",
        entity: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        self._options = {"project": project, "entity": entity, "name": name, "mode": mode}

    def open(self, run: LoggedRun) -> None:
        """Waits up to a minute until no other W&B run is open in this process. Raises: RuntimeError if one still is."""
        import wandb

        # The generation before may have ended in this process, and still be sending.
        until_s = time.monotonic() + _PREVIOUS_S
        while wandb.run is not None:
            if time.monotonic() > until_s:
                raise RuntimeError("another W&B run is open in this process")
            time.sleep(0.05)
        # Silent: it neither tears the progress bar nor asks for an API key on a terminal.
        wandb.setup(settings=wandb.Settings(silent=True))
        folder = run.store.root if isinstance(run.store, LocalStore) and "WANDB_DIR" not in os.environ else None
        self._run: Any = wandb.init(
            **{**self._options, "name": self._options["name"] or run.name},
            id=run.read_id(),
            resume="allow",
            dir=folder,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # What a person changed between generations is allowed to change.
        self._run.config.update({**run.config, "world_size": run.world_size}, allow_val_change=True)
        # W&B's own step may not fall, but a generation repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        logger.info("W&B: %s", self._run.url or f"offline; `wandb sync {self._run.dir.removesuffix('/files')}` sends it")

    def log(self, point: MetricPoint) -> None:
        self._run.log({**point.values, "step": point.step, "_timestamp": point.time})

    def close(self, *, complete: bool) -> None:
        if not complete:
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if complete else 1)
