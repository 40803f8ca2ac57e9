"""Shows the progress of a run: on the terminal, and as curves in loggers. Rank 0 only."""

import sys
import time
from collections.abc import Mapping

import torch

from elastictrain.checkpoint.lineage import number_of
from elastictrain.config.digest import to_tree
from elastictrain.events import Resume, Step
from elastictrain.telemetry.flops import peak_flops
from elastictrain.telemetry.host_metrics import DeviceBusySampler, host_scalars
from elastictrain.telemetry.loggers import LoggedRun, LoggerThread, close_loggers, make_loggers
from elastictrain.telemetry.progress import Progress
from elastictrain.telemetry.run_totals import RunTotalsLogger
from elastictrain.train.context import TrainContext
from elastictrain.train.evaluate import Evaluation


class Observer:
    """The observer of all ranks but rank 0: it shows nothing."""

    def on_step(self, step: Step, *, step_s: float, skipped_total: int) -> None:
        """Called after each step. `skipped_total`: steps of the run so far whose update was left out."""

    def on_eval(self, step: int, found: Evaluation) -> None:
        """Called after each evaluation."""

    def mfu_of(self, tokens_per_s: float) -> float | None:
        """The MFU at this speed; None where it is not known."""
        return None

    def print_line(self, text: str) -> None:
        """Show a line of text without tearing the progress bar."""

    def close(self) -> None:
        """Finish the progress bar and write pending figures."""


class Curves:
    """The loggers of a generation, on rank 0."""

    def __init__(self, context: TrainContext, *, first_step: int, total_steps: int) -> None:
        """`total_steps` is 0 where it is not known. Raises: ConfigError."""
        config, self._device = context.config, context.group.device
        run = LoggedRun(
            store=context.store,
            config=to_tree(config),
            world_size=context.identity.world_size,
            generation=context.generation.name,
            first_step=first_step,
            total_steps=total_steps,
            flush_s=config.telemetry.flush_s,
            close_s=config.fault.close_s,
        )
        self._close_s = run.close_s
        self._threads = [LoggerThread(name, one, run) for name, one in make_loggers(config.telemetry.loggers)]
        self._totals = RunTotalsLogger(began=context.began, newest_step=_newest_step(context))
        self._totals_threads = [LoggerThread("run/goodput", self._totals, run)] if self._threads else []
        self._busy = DeviceBusySampler(self._device)
        # Restarts and changes of the world can be seen beside the curves.
        self._world = {"run/world_size": float(run.world_size), "run/generation": float(number_of(run.generation))}
        if self._threads:
            # The first call starts the interval that the next one measures.
            host_scalars(self._device)

    def log(self, step: int, values: Mapping[str, float], *, with_host: bool = True) -> None:
        """`with_host`: with what is known of the run, its host and its device; False for a step of which a point tells it."""
        if self._threads and with_host:
            for totals in self._totals_threads:
                totals.log(step, values)
            # Both are those of the point before.
            later = {**self._totals.scalars, **self._busy.scalars}
            self._busy.ask()
            values = {**values, **host_scalars(self._device), **self._world, **later}
        for one in self._threads:
            one.log(step, values)

    def close(self) -> None:
        self._busy.close()
        close_loggers([*self._threads, *self._totals_threads], limit_s=self._close_s)


def _newest_step(context: TrainContext) -> int:
    """The newest step that the launcher knows to have been done by the generation before; 0 if it knows none."""
    launcher = context.identity.launcher
    plan = launcher.recovery if launcher is not None else None
    return plan.step if plan is not None else 0


class LogRankObserver(Observer):
    """Averages speeds between logged steps, and shows the logged steps."""

    def __init__(self, context: TrainContext, resume: Resume, *, flops_per_token: float | None) -> None:
        config, device = context.config, context.group.device
        self._config = config
        self._first_step = resume.step + 1
        self._progress = Progress(
            config.telemetry.progress,
            stream=sys.stderr,
            total_steps=config.train.steps,
            start_step=resume.step,
            clock=time.monotonic,
        )
        self._curves = Curves(context, first_step=self._first_step, total_steps=config.train.steps)
        # Times tokens/s this is the MFU; None without a known device peak and model FLOPs. Source: PaLM, appendix B.
        self._utilisation_per_token: float | None = None
        peak: float | None = None
        if config.telemetry.peak_tflops is not None:
            peak = config.telemetry.peak_tflops * 1e12
        elif device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device), precision=config.train.precision)
        if peak is not None and flops_per_token is not None:
            self._utilisation_per_token = flops_per_token / (context.identity.world_size * peak)
        self._steps = 0
        self._seconds = 0.0
        self._samples, self._tokens = 0.0, 0.0
        if not resume.checkpoint:
            self.print_line(f"starting at step 0: nothing to resume in {context.store.url}")
        else:
            places = {"storage": f"{context.store.url}/checkpoints/{resume.checkpoint}", "memory": "host memory"}
            self.print_line(f"resumed at step {resume.step} from {places.get(resume.tier, 'the memory of another host')}")

    def on_step(self, step: Step, *, step_s: float, skipped_total: int) -> None:
        """Logs the first, the last and each `telemetry.log_every_steps`th step; speeds are means since the last logged one."""
        self._steps += 1
        self._seconds += step_s
        self._samples += step.samples_per_s * step_s
        self._tokens += (step.tokens_per_s or 0.0) * step_s
        self._progress.advance(step.step)
        ends = (self._first_step, self._config.train.steps)
        if step.step % self._config.telemetry.log_every_steps and step.step not in ends:
            return
        seconds = max(self._seconds, 1e-9)
        tokens_per_s = self._tokens / seconds
        # TensorBoard sorts by tag and unfolds the first groups.
        figures = {
            "loss/train": step.loss,
            "optimizer/lr": step.lr,
            "optimizer/grad_norm": step.grad_norm,
            "optimizer/skipped": float(skipped_total),
            "speed/samples_per_s": self._samples / seconds,
            "speed/step_s": self._seconds / self._steps,
            **{f"{name}/train": value for name, value in step.metrics.items()},
        }
        if step.tokens_per_s is not None:
            figures["speed/tokens_per_s"] = tokens_per_s
        if (mfu := self.mfu_of(tokens_per_s)) is not None:
            figures["speed/mfu"] = mfu
        self._steps, self._seconds, self._samples, self._tokens = 0, 0.0, 0.0, 0.0
        self._progress.show(step.step, figures)
        self._curves.log(step.step, figures)

    def on_eval(self, step: int, found: Evaluation) -> None:
        shown = {"loss": found.loss, **found.metrics}
        self._progress.print_line(f"step {step}: held-out {', '.join(f'{name} {value:.4f}' for name, value in shown.items())}")
        self._curves.log(step, {f"{name}/held_out": value for name, value in shown.items()}, with_host=False)

    def mfu_of(self, tokens_per_s: float) -> float | None:
        per_token = self._utilisation_per_token
        return tokens_per_s * per_token if per_token is not None else None

    def print_line(self, text: str) -> None:
        self._progress.print_line(text)

    def close(self) -> None:
        self._progress.close()
        self._curves.close()
