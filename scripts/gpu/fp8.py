"""What products in 8 bits gain on one GPU, and what they cost: our step in each precision, and the loss of the same samples.

    python scripts/gpu/fp8.py [speed] [layers] [loss]     (all by default)

`speed`: Llama 1b as its recipe trains it; `layers`: eight layers of Llama 8b; both in turns with bf16, and some variants of
ours that are not options (VARIANTS). `loss`: LOSS_STEPS steps (500) of Llama 1b, in bf16, in fp8, and in bf16 again, which
tells what chance does. EXTRA are arguments of all runs.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "process")]

from torchruns import last_wins, losses  # noqa: E402

EXTRA = os.environ.get("EXTRA", "").split()
LOSS_STEPS = int(os.environ.get("LOSS_STEPS", "500"))
STEP_LIMIT_S, LOSS_LIMIT_S = 150, 400
BASE = ("data=stdlib", "data.holdout_samples=0")
ONE_B = ("recipe=llama_fsdp", "train.global_batch=4", "train.micro_batch=4")
LAYERS = ("recipe=llama_hsdp", "parallel=fsdp", "model.num_layers=8", "train.global_batch=2")
NONE, SELECTIVE = "train.activation_checkpointing=none", "train.activation_checkpointing=selective"
FP8, ROWS = "train.precision=fp8", "train.fp8_scaling=rowwise"

# The name of a variant, or "", and arguments.
SPEED = (("", ()), ("", (FP8,)), ("", (FP8, ROWS)), ("gathers", (FP8,)), ("large", (FP8,)), ("", ()), ("", (FP8,)))
IN_LAYERS = (
    ("", (NONE,)),
    ("", (NONE, FP8)),
    ("gathers", (NONE, FP8)),
    ("large", (NONE, FP8)),
    ("", (SELECTIVE, FP8)),
    ("scales", (SELECTIVE, FP8)),
)


def _gather_in_bf16() -> None:
    from elastictrain.distributed.float8 import GatheredWeights

    GatheredWeights.of = classmethod(lambda cls, model, *, train: cls())  # type: ignore[method-assign,assignment]


def _leave_small_layers() -> None:
    from elastictrain.train import parameters

    suits = parameters.suits
    # Source: torchao's filter for tensorwise scales.
    parameters.suits = lambda one: suits(one) and not (one.in_features <= 4096 and one.out_features <= 1024)  # type: ignore[attr-defined]


def _recompute_scales() -> None:
    from elastictrain.distributed import wrapping

    wrapping._SCALES = frozenset()


VARIANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "gathers": _gather_in_bf16,  # FSDP gathers in 16 bits, and each pass casts
    "large": _leave_small_layers,  # keys and values in bf16
    "scales": _recompute_scales,  # selective checkpointing does not keep them
}


def run(command: list[str], *, limit_s: float, **variables: str) -> str:
    """What it prints; the end of that if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **variables}
    try:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s} s"
    return done.stdout if not done.returncode else f"exit code {done.returncode}: {done.stdout[-500:]} {done.stderr[-2500:]}"


def compare(base: tuple[str, ...], settings: tuple[tuple[str, tuple[str, ...]], ...], *, steps: int) -> None:
    """One line for each setting: variant, arguments, and what bench_step.py finds."""
    for variant, arguments in settings:
        command = [__file__, "step", variant, *last_wins([*base, *BASE, *arguments, *EXTRA])]
        said = run(command, limit_s=STEP_LIMIT_S, BENCH_ALONE="1", BENCH_STEPS=str(steps), BENCH_BLOCKS="3")
        found = re.findall(r"^(?:ours +|peak memory )(.*)$", said, re.MULTILINE)
        print(f"{variant or 'as it is':9} {' '.join(arguments):60} {'; '.join(found) or said}", flush=True)


def follow_losses(folder: Path) -> None:
    """The same samples in each run, and how far the mean losses of each tenth are from those of the first run."""
    found: dict[str, list[float]] = {}
    for name, precision in (("bf16", "bf16"), ("fp8", "fp8"), ("again", "bf16")):
        run_dir = folder / name
        size = ("train.global_batch=4", "train.micro_batch=4", f"train.steps={LOSS_STEPS}")
        silent = (
            "train.eval_every_steps=0",
            "checkpoint.every_steps=0",
            "checkpoint.buffers=0",
            "telemetry.loggers=[]",
            f"run.dir={run_dir}",
        )
        arguments = last_wins([*ONE_B, *BASE, *size, *silent, *EXTRA, f"train.precision={precision}"])
        said = run(["-m", "elastictrain.run", *arguments], limit_s=LOSS_LIMIT_S)
        found[name] = list(losses(run_dir).values())
        if len(found[name]) < LOSS_STEPS:
            print(said, flush=True)
            break
        print_losses(name, found["bf16"], found[name])


def print_losses(name: str, reference: list[float], values: list[float]) -> None:
    """The mean of each tenth, and how far it is from that of `reference`."""
    tenth = LOSS_STEPS // 10
    for first in range(0, LOSS_STEPS, tenth):
        one, other = (statistics.fmean(numbers[first : first + tenth]) for numbers in (values, reference))
        print(f"{name:5} steps {first + 1:4} to {first + tenth:4}: {one:.4f} ({one / other - 1:+.3%})", flush=True)


def main() -> None:
    wanted = sys.argv[1:] or ["speed", "layers", "loss"]
    if wanted[0] == "step":
        variant, sys.argv[1:] = wanted[1], wanted[2:]
        import bench_step

        VARIANTS[variant]()
        bench_step.leave_process(bench_step.main())
    if "speed" in wanted:
        compare(ONE_B, SPEED, steps=10)
    if "layers" in wanted:
        compare(LAYERS, IN_LAYERS, steps=5)
    if "loss" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            follow_losses(Path(folder))


if __name__ == "__main__":
    main()
