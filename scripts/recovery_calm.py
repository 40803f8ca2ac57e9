"""What `bench_recovery.py --calm` measures in a run that nothing happens to: how long saves hold training up, and how regular
the signs of life of its workers are."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles

import torch.distributed as dist
from recovery_report import Row
from recovery_run import Run

from elastictrain.bounded_json import parse_record
from elastictrain.liveness.heartbeats import Heartbeat
from elastictrain.liveness.monitor_client import default_parent
from elastictrain.liveness.progress_file import ProgressFileReader

LOOK_S = 0.005  # the watchdog shows every 0.1 s that threads of a worker can run
STORE_EVERY_S = 0.2  # heartbeats come every `fault.heartbeat_s`, and have the time at which they were written
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class SignsOfLife:
    """Seconds between two of them, by rank."""

    heartbeats: dict[int, list[float]]  # in the store of the ranks
    pulses: dict[int, list[float]]  # as the rank monitor sees them


def watch(run: Run, *, seconds: float) -> SignsOfLife:
    """Observe the present generation, from outside of its processes: what they write is read, and they are not asked."""
    name = next(row["incarnation"] for row in reversed(run.events.update()) if row["event"] == "step")
    ranks = [*run.workers()]
    found = SignsOfLife({rank: [] for rank in ranks}, {rank: [] for rank in ranks})
    readers = {rank: ProgressFileReader(f"{default_parent()}/{name}-r00000", rank) for rank in ranks}
    newest = max((run.folder / "run" / "launch" / "generations").glob("*.json"))
    port = json.loads(newest.read_text())["master_port"]
    client = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    store = dist.PrefixStore(f"elastictrain/{name}", client)
    pulses = dict.fromkeys(ranks, (-1, 0.0))
    beats: dict[int, Heartbeat] = {}
    asked_s, until_s = 0.0, time.monotonic() + seconds
    while (now_s := time.monotonic()) < until_s and run.process.poll() is None:
        for rank, reader in readers.items():
            progress, (before, since_s) = reader.read(), pulses[rank]
            if progress is not None and progress.pulse != before:
                if before >= 0:
                    found.pulses[rank].append(now_s - since_s)
                pulses[rank] = progress.pulse, now_s
        if now_s - asked_s >= STORE_EVERY_S:
            asked_s = now_s
            for rank in ranks:
                beat = parse_record(store.get(f"beat/{rank}"), Heartbeat)
                last = beats.get(rank)
                if last is not None and beat.number == last.number + 1:
                    found.heartbeats[rank].append(beat.time - last.time)
                beats[rank] = beat
        time.sleep(LOOK_S)
    for reader in readers.values():
        reader.close()
    return found


def stalls(run_dir: Path) -> dict[str, list[float]]:
    """How long rank 0 waited for each of its snapshots: for those of steps that became checkpoints, and for others."""
    rows: list[Row] = []
    for path in (run_dir / "events").glob("*-[rk]*.jsonl"):
        for line in path.read_text().splitlines():
            # The last line may be torn.
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    saved = {row["step"] for row in rows if row["event"] == "checkpoint_saved"}
    found: dict[str, list[float]] = {"snapshots that are saved": [], "other snapshots": []}
    for row in rows:
        if row["event"] == "snapshot":
            found["snapshots that are saved" if row["step"] in saved else "other snapshots"].append(row["stall_s"])
    return found


def spread(values: Sequence[float]) -> str:
    """Median, 99th percentile and worst, in milliseconds."""
    if not values:
        return f"{0:5d}" + 3 * f"{'-':>10}"
    high = quantiles(values, n=100)[98] if len(values) > 1 else values[0]
    return f"{len(values):5d}" + "".join(f"{1000 * one:10.1f}" for one in (median(values), min(high, max(values)), max(values)))


def calm_table(found: SignsOfLife, stalled: Mapping[str, Sequence[float]]) -> list[str]:
    rows: list[tuple[str, Iterable[float]]] = [(f"stall of {name}", values) for name, values in stalled.items()]
    for what, by_rank in (("heartbeats in the store", found.heartbeats), ("pulses of the watchdog", found.pulses)):
        rows.append((f"between {what}", [one for values in by_rank.values() for one in values]))
        rows += [(f"  rank {rank}", values) for rank, values in sorted(by_rank.items())]
    head = f"{'milliseconds':34}{'n':>5}{'median':>10}{'p99':>10}{'worst':>10}"
    return [head, *(f"{label:34}{spread([*values])}" for label, values in rows)]
