"""What `--dry-run` says of a GPU's memory, against the peak of a run: five variants on one GPU, a few steps of each.

    python scripts/gpu/memory.py [--only NAME ...] [--steps 4] [-- OVERRIDE ...]

The trainer itself runs each variant; the prediction is made meanwhile, on the CPU. Without a GPU nothing is measured, and the
table has predictions alone. OVERRIDES count for each variant.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "process"))

BASE = (
    "data=stdlib",
    "data.holdout_samples=0",
    "train.eval_every_steps=0",
    "train.steps=1000",
    "telemetry.loggers=[]",
    "telemetry.progress=off",
    "checkpoint.every_steps=0",
    "checkpoint.buffers=0",
    "preflight=off",
)
VARIANTS = {
    "150m, compiled": ("recipe=llama_ddp", "train.micro_batch=16", "train.global_batch=32"),
    "150m, eager, selective": (
        "recipe=llama_ddp",
        "train.micro_batch=16",
        "train.global_batch=16",
        "train.compile=false",
        "train.activation_checkpointing=selective",
    ),
    "1b, compiled": ("recipe=llama_fsdp", "train.micro_batch=4", "train.global_batch=8"),
    "1b, compiled, selective": (
        "recipe=llama_fsdp",
        "train.micro_batch=8",
        "train.global_batch=8",
        "train.activation_checkpointing=selective",
    ),
    "1b, compiled, full": (
        "recipe=llama_fsdp",
        "train.micro_batch=8",
        "train.global_batch=16",
        "train.activation_checkpointing=full",
    ),
}
CHILD = "--child"


def train(run_dir: Path, arguments: list[str], *, steps: int) -> None:
    """In a process of its own: the trainer, and a thread that tells the peak after some steps and ends the process."""
    import torch
    from torchruns import last_step

    from elastictrain.run import main

    def watch() -> None:
        while last_step(run_dir) < steps:
            time.sleep(0.05)
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        rest = total - free - torch.cuda.memory_reserved()
        print(json.dumps({"allocated": allocated, "reserved": reserved, "beside": rest, "total": total}), flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    os._exit(main([*arguments, f"run.dir={run_dir}"]))


def predict(arguments: list[str]) -> dict[str, float]:
    """Bytes by use at the peak, and the seconds that it took to find them."""
    from typing import cast

    from elastictrain.config.load import load
    from elastictrain.config.task_signature import build_task
    from elastictrain.identity import Identity
    from elastictrain.train.dry_run import blank_samples
    from elastictrain.train.memory_trace import trace_step
    from elastictrain.train.task import Task

    began, config = time.monotonic(), load(arguments)
    identity = Identity(0, 1, 0, 1, "localhost", launched=False)
    peak = trace_step(config, cast(Task, build_task(config)), identity, samples=blank_samples(config))
    uses = {str(use): float(num_bytes) for use, num_bytes in peak.uses.items()}
    return {"peak": float(peak.num_bytes), **uses, "seconds": time.monotonic() - began}


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        train(Path(sys.argv[2]), sys.argv[4:], steps=int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    import torch
    from torchruns import environment, last_wins

    measures, worst = torch.cuda.is_available(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(given.only):
            arguments = last_wins([*VARIANTS[name], *BASE, *given.overrides])
            began = time.monotonic()
            command = [sys.executable, __file__, CHILD, f"{folder}/{number}", str(given.steps), *arguments]
            # The checkpoint at the end of a run is not written: the process ends itself.
            log = Path(folder, f"{number}.log")
            with log.open("w") as errors:
                child = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True)
            if not measures:
                child.kill()
            predicted = predict(arguments)
            said, _ = child.communicate()
            row: dict[str, object] = {"variant": name, "predicted_gb": predicted.pop("peak") / 1e9}
            if measures and child.returncode == 0:
                found = json.loads(said.splitlines()[-1])
                row |= {f"{key}_gb": num_bytes / 1e9 for key, num_bytes in found.items()}
                row["error"] = float(str(row["predicted_gb"])) / (found["allocated"] / 1e9) - 1
                worst = max(worst, abs(float(str(row["error"]))))
            elif measures:
                row["failed"], worst = log.read_text()[-3000:], 1.0
            row |= {"dry_run_s": predicted.pop("seconds"), "wall_s": time.monotonic() - began}
            row["uses_gb"] = {use: round(num_bytes / 1e9, 2) for use, num_bytes in predicted.items()}
            rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(json.dumps(rounded), flush=True)
    print(f"worst error: {worst:.1%}" if measures else "no GPU: nothing measured", flush=True)
    return int(worst > 0.1)


if __name__ == "__main__":
    sys.exit(main())
