"""Seconds from the command to the first step by part: with nothing compiled, then with what this host has compiled.

    python scripts/first_step.py [--turns 2] [--ways run,launch] [--sample] -- recipe=llama_fsdp [OVERRIDE ...]

Each run has a folder of its own and is killed after its first step. All have one new folder for temporary files, so the first
one finds nothing compiled. --sample adds a run whose main thread is looked at a hundred times a second: where it is, by part.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "process")]

BASE = ("data=stdlib", "train.steps=1000", "telemetry.progress=off", "checkpoint.every_steps=0")
CHILD = "--child"
EVERY_S, SHOWN = 0.01, 6
LIMIT_S = float(os.environ.get("LIMIT_S", "240"))


def first_step(run_dir: Path) -> dict[str, Any] | None:
    """The event, once it is there."""
    for file in (run_dir / "events").glob("*-r00000.jsonl"):
        for line in file.read_text().splitlines():
            if '"event": "first_step"' in line and line.endswith("}"):
                row: dict[str, Any] = json.loads(line)
                return row
    return None


def start(way: str, arguments: list[str], run_dir: Path) -> dict[str, float]:
    """Start a run, end it after its first step, and return the seconds by part; `wall` is what this process has waited."""
    from torchruns import Run

    command = [sys.executable, "-m", f"elastictrain.{way}"] if way != "sample" else [sys.executable, __file__, CHILD]
    began = time.time()
    log = run_dir.with_suffix(".log")
    with log.open("wb") as output:
        line = [*command, *arguments, f"run.dir={run_dir}"]
        process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    run, until = Run(process, log), time.monotonic() + LIMIT_S
    try:
        while (row := first_step(run_dir)) is None:
            if run.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(run.output()[-4000:])
            time.sleep(0.02)
        if way == "sample":
            run.wait(30)
            print(run.output()[run.output().rindex("SAMPLES") :], flush=True)
    finally:
        run.kill_tree()
        process.wait(60)
    return {**row["seconds"], "wall": row["time"] - began}


def sample(arguments: list[str]) -> None:
    """In a process of its own: the trainer, and a thread that looks at it."""
    import elastictrain.run
    from elastictrain import start_times

    run_dir = Path(arguments[-1].partition("=")[2])
    times: list[start_times.StartTimes] = []
    of_this_process = start_times.of_this_process

    def remembered(environment: Any) -> start_times.StartTimes:
        times.append(of_this_process(environment))
        return times[0]

    elastictrain.run.of_this_process = remembered
    seen: dict[int, Counter[str]] = {}
    main_thread = threading.main_thread().ident

    def look() -> None:
        looked = time.monotonic()
        while True:
            time.sleep(EVERY_S)
            frame = sys._current_frames().get(main_thread or 0)
            names: list[str] = []
            while frame is not None:
                code = frame.f_code
                own = "elastictrain" in code.co_filename or "recipes" in code.co_filename
                if not names or (own and len(names) < 4):
                    names.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}")
                frame = frame.f_back
            place = len(times[0].seconds) if times else 0
            seen.setdefault(place, Counter())[" < ".join(names)] += 1
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                if first_step(run_dir) is not None:
                    break
        parts = ["(before)", *times[0].seconds, "(after)"]
        print("SAMPLES by part and place, in hundredths of a second at least")
        for place, counter in sorted(seen.items()):
            print(f"{parts[min(place, len(parts) - 1)]} and after it began:" if place else "start:")
            for name, number in counter.most_common(SHOWN):
                print(f"  {number:5d} {name}")
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=look, daemon=True).start()
    os._exit(elastictrain.run.main(arguments))


def show(rows: dict[str, list[dict[str, float]]]) -> None:
    """A table: parts down, kinds of start across; medians."""
    names = dict.fromkeys(name for found in rows.values() for row in found for name in row if name != "wall")
    print(f"{'seconds':<18}" + "".join(f"{kind:>14}" for kind in rows))

    def line(name: str, values: list[float]) -> None:
        print(f"{name:<18}" + "".join(f"{value:>14.2f}" for value in values))

    for name in names:
        line(name, [statistics.median(row.get(name, 0.0) for row in found) for found in rows.values()])
    total = [statistics.median(sum(row.values()) - row["wall"] for row in found) for found in rows.values()]
    line("all parts", total)
    line("by the clock", [statistics.median(row["wall"] for row in found) for found in rows.values()])


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        sample(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="starts of each way with compiled code")
    parser.add_argument("--ways", default="run,launch")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    from torchruns import last_wins

    rows: dict[str, list[dict[str, float]]] = {}
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        tempfile.TemporaryDirectory(dir=shared, ignore_cleanup_errors=True) as memory,
    ):
        folder = Path(name)
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        print(f"import torch alone, the first time here: {time.monotonic() - began:.1f} s", flush=True)
        os.environ["TMPDIR"] = name
        ways = given.ways.split(",")
        kinds = [(f"{ways[0]}, cold", ways[0]), *[(f"{way}, warm", way) for _ in range(given.turns) for way in ways]]
        kinds += [("sampled", "sample")] if given.sample else []
        for number, (kind, way) in enumerate(kinds):
            arguments = last_wins([*BASE, f"checkpoint.memory_dir={memory}", *given.overrides])
            row = start(way, arguments, folder / f"run-{number}")
            rows.setdefault(kind, []).append(row)
            print(json.dumps({"kind": kind, **row}), flush=True)
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
