"""Shows a person how the run goes: progress on the terminal and curves in TensorBoard. Rank 0 only."""

import sys
import time

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.events import Resume
from elastictrain.identity import Identity
from elastictrain.storage.store import Store
from elastictrain.telemetry.flops import mfu, peak_flops
from elastictrain.telemetry.progress import Progress, Reading
from elastictrain.telemetry.scalars import HostProbe, scalars_of
from elastictrain.telemetry.tensorboard import ScalarWriter
from elastictrain.train.cadence import Intervals, is_logged
from elastictrain.train.loop import StepReport


class Observing:
    """Averages speeds between logged steps, and shows what was logged."""

    def __init__(
        self,
        intervals: Intervals,
        *,
        first_step: int,
        progress: Progress,
        scalars: ScalarWriter | None,
        probe: HostProbe,
        close_timeout_s: float,
        utilisation_per_token: float | None,
    ) -> None:
        """`utilisation_per_token` times tokens/s is the MFU; None if the peak or the model's arithmetic is not known."""
        self._intervals = intervals
        self._first_step = first_step
        self._progress = progress
        self._scalars = scalars
        self._probe = probe
        self._close_timeout_s = close_timeout_s
        self._utilisation_per_token = utilisation_per_token
        self._steps = 0
        self._seconds = 0.0
        self._tokens = 0.0

    def on_step(self, report: StepReport) -> None:
        """Count the step, and show the figures if it is a logged one."""
        self._steps += 1
        self._seconds += report.step_s
        self._tokens += report.tokens_per_s * report.step_s
        self._progress.advance(report.step)
        if not is_logged(report.step, self._intervals, first_step=self._first_step):
            return
        tokens_per_s = self._tokens / max(self._seconds, 1e-9)
        per_token = self._utilisation_per_token
        reading = Reading(
            step=report.step,
            loss=report.loss,
            lr=report.rate,
            grad_norm=report.grad_norm,
            tokens_per_s=tokens_per_s,
            step_s=self._seconds / self._steps,
            mfu=None if per_token is None else tokens_per_s * per_token,
            skipped=report.skipped_total,
        )
        self._steps, self._seconds, self._tokens = 0, 0.0, 0.0
        self._progress.show(reading)
        if self._scalars is not None:
            self._scalars.write(report.step, {**scalars_of(reading), **self._probe.scalars()})

    def on_eval(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        self._progress.say(f"step {step}: held-out loss {loss:.4f}")
        if self._scalars is not None:
            self._scalars.write(step, {"loss/held_out": loss})

    def say(self, text: str) -> None:
        """Show a line of text without tearing the progress bar."""
        self._progress.say(text)

    def close(self) -> None:
        """Leave the terminal in order and write what is waiting."""
        self._progress.close()
        if self._scalars is not None:
            self._scalars.close(timeout_s=self._close_timeout_s)


class Silent:
    """For ranks that do not speak."""

    def on_step(self, report: StepReport) -> None:
        """Does nothing."""

    def on_eval(self, step: int, loss: float) -> None:
        """Does nothing."""

    def say(self, text: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def make_observer(
    config: RunConfig,
    identity: Identity,
    store: Store,
    *,
    device: torch.device,
    resume: Resume,
    flops_per_token: float | None,
) -> Observing | Silent:
    """What rank 0 shows; nothing on other ranks. `flops_per_token`: the model's arithmetic, if it is known."""
    if not identity.speaks:
        return Silent()
    options = config.telemetry
    progress = Progress(
        options.progress,
        stream=sys.stderr,
        total_steps=config.train.steps,
        start_step=resume.step,
        clock=time.monotonic,
    )
    scalars = ScalarWriter(store, purge_step=resume.step + 1, flush_s=options.flush_s) if options.tensorboard else None
    if resume.checkpoint:
        progress.say(f"resumed at step {resume.step} from {_where(resume, store)}")
    return Observing(
        Intervals(config.train.steps, 0, 0, options.log_every_steps),
        first_step=resume.step + 1,
        progress=progress,
        scalars=scalars,
        probe=HostProbe(device),
        close_timeout_s=config.fault.close_s,
        utilisation_per_token=_utilisation_per_token(
            config, num_devices=identity.world_size, device=device, flops_per_token=flops_per_token
        ),
    )


def _where(resume: Resume, store: Store) -> str:
    if resume.tier == "storage":
        return f"{store.url}/checkpoints/{resume.checkpoint}"
    return "host memory" if resume.tier == "memory" else "the memory of another host"


def _utilisation_per_token(
    config: RunConfig, *, num_devices: int, device: torch.device, flops_per_token: float | None
) -> float | None:
    peak = None
    if config.telemetry.peak_tflops is not None:
        peak = config.telemetry.peak_tflops * 1e12
    elif device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), precision=config.train.precision)
    if peak is None or flops_per_token is None:
        return None
    return mfu(flops_per_token, num_devices=num_devices, peak_flops_per_s=peak)
