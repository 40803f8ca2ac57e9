"""Gives three hosts (or five) one thing that is wrong at a time, and looks at what the preflight says of it.

    sudo .venv/bin/python scripts/faults.py
    sudo .venv/bin/python scripts/faults.py --only loss mtu --seed 7
    sudo .venv/bin/python scripts/faults.py --only nothing --healthy 50 --load

The hosts are network namespaces on this machine; it needs root, and `nft` for firewalls and loss. Who is ill is chosen from
the seed. A fault is named rightly if the checks that fail are those that are meant, of the hosts or links that are meant, and
if the advice has the words that it must have. Prints a row for each fault and a table at the end. Exit code 1 if fewer than
95 % were named rightly, or if a healthy start failed.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / one) for one in ("scripts", "tests/network", "tests/process", "")]

from fault_list import FAULTS, PORT, Fault, Named, Scene, nothing  # noqa: E402

from elastictrain.chaos.network.hosts import VirtualNetwork  # noqa: E402

MEMBER = ROOT / "tests/network/host_preflight_member.py"
LIMIT_S = 60.0
WAIT_S = 8.0  # how long hosts wait for one that says nothing; 10 s is the default
GOAL = 0.95


@dataclass(frozen=True, slots=True)
class Finding:
    fault: Fault
    wanted: Named
    named: Named
    advised: bool
    seconds: float  # with the start of Python
    own_s: float  # the preflight alone

    @property
    def right(self) -> bool:
        return self.wanted == self.named and self.advised


def look(fault: Fault, folder: Path, *, seed: int, load: bool = False) -> Finding:
    with VirtualNetwork(folder / "network") as network:
        hosts = [network.add(name) for name in "abcde"[: fault.hosts]]
        run_dir, exchange = folder / "run", folder / "exchange"
        for one in (run_dir, exchange):
            one.mkdir()
        scene = Scene(hosts, folder, run_dir, random.Random(f"{seed} {fault.name}"))
        wanted = fault.act(scene)
        with busy() if load else nullcontext():
            began = time.monotonic()
            rows, own_s = preflight(scene, exchange, level=fault.level)
            seconds = time.monotonic() - began
    statuses = ("fail", "warn") if fault.warned else ("fail",)
    kinds = {check for check, _ in wanted}
    bad = [row for row in rows if row["status"] == "fail" or (row["status"] in statuses and row["check"] in kinds)]
    named = {(row["check"], row["subject"]) for row in bad}
    advised = all(fault.words in row["remedy"] for row in bad if row["check"] in kinds)
    return Finding(fault, wanted, named, advised, seconds, own_s)


def preflight(scene: Scene, exchange: Path, *, level: str) -> tuple[list[dict[str, Any]], float]:
    """The verdicts of the first host, and the seconds that its preflight took."""
    names = ",".join(host.name for host in scene.hosts)
    runs, began = {}, time.monotonic()
    for rank, host in enumerate(scene.hosts):
        if host.name in scene.absent:
            continue
        command = [sys.executable, str(MEMBER), host.name, str(rank), names]
        command += [scene.hosts[0].address, level, str(scene.run_dir), str(PORT), str(exchange)]
        variables = {"GLOO_SOCKET_IFNAME": "", "PYTHONPATH": str(ROOT), "WAIT_S": str(WAIT_S)}
        variables |= scene.variables.get(host.name, {})
        command = [*scene.prefixes.get(host.name, []), *command]
        runs[host.name] = host.popen(command, log=scene.folder / f"{host.name}.txt", extra_environment=variables)
    for after_s, act in scene.later:
        time.sleep(max(0.0, began + after_s - time.monotonic()))
        act(runs)
    first = runs[scene.hosts[0].name]
    first.wait(LIMIT_S)
    lines = [line for line in first.output().splitlines() if line.startswith("[{")]
    if not lines:
        print(first.output()[-3000:])
        return [], math.nan
    (told,) = (line for line in first.output().splitlines() if line.startswith("seconds "))
    return list(json.loads(lines[0])), float(told.split()[1])


@contextmanager
def busy() -> Iterator[None]:
    """Other processes keep all processors busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


def shown(named: Named) -> str:
    return ", ".join(f"{check} {subject}" for check, subject in sorted(named)) or "nothing"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", metavar="WORD", help="faults whose name has one of these words")
    parser.add_argument("--healthy", type=int, default=10, metavar="N", help="starts with nothing wrong")
    parser.add_argument("--load", action="store_true", help="other processes keep all processors busy in healthy starts")
    parser.add_argument("--json", metavar="FILE")
    parsed = parser.parse_args()
    chosen = [one for one in FAULTS if parsed.only is None or any(word in one.name for word in parsed.only)]
    found: list[Finding] = []
    healthy = [Fault(f"healthy {number + 1}", nothing, level=("quick", "full")[number % 2]) for number in range(parsed.healthy)]
    for fault in [*chosen, *healthy]:
        with tempfile.TemporaryDirectory() as name:
            one = look(fault, Path(name), seed=parsed.seed, load=parsed.load and fault in healthy)
        found.append(one)
        rest = "" if one.right else f"  wanted {shown(one.wanted)}" + ("" if one.advised else "; advice lacks words")
        print(f"{'ok   ' if one.right else 'WRONG'} {one.seconds:5.1f} s  {fault.name}: {shown(one.named)}{rest}", flush=True)
    ill = [one for one in found if one.fault in chosen]
    right, wrong = sum(one.right for one in ill), [one for one in found if one.fault in healthy and not one.right]
    quick = [one for one in found if one.fault.level == "quick" and not one.wanted]
    print(f"\n{right} of {len(ill)} faults named rightly, {len(wrong)} of {len(healthy)} healthy starts failed")
    if quick:
        own_s, seconds = sorted(one.own_s for one in quick), statistics.median(one.seconds for one in quick)
        print(
            f"a quick preflight without a fault: {statistics.median(own_s):.2f} s (median; {own_s[0]:.2f} to {own_s[-1]:.2f}), "
            f"{seconds:.1f} s with the start of Python"
        )
    if parsed.json:
        rows = [
            {
                "name": one.fault.name,
                "right": one.right,
                "wanted": sorted(one.wanted),
                "named": sorted(one.named),
                "seconds": one.seconds,
                "own_s": one.own_s,
            }
            for one in found
        ]
        Path(parsed.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(bool(wrong) or right < GOAL * len(ill))


if __name__ == "__main__":
    sys.exit(main())
