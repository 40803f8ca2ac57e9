"""One host's part in the link checks, for the network tests: words are files in a folder that all hosts see.

python link_member.py FACTS     (JSON: see `Facts` in faults.py; prints the report as JSON in its last line)
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from elastictrain.preflight.links.baseline import decode_baseline
from elastictrain.preflight.links.options import LinkOptions
from elastictrain.preflight.links.session import LinkSession, Member


class Folder:
    """An exchange of files. Somebody who is to fall silent does so when he first asks for the word `stop_at`."""

    def __init__(self, path: Path, *, stop_at: str) -> None:
        self._path = path
        self._stop_at = stop_at

    def put(self, key: str, value: bytes) -> None:
        path = self._path / key.replace("/", "-")
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(value)
        part.rename(path)

    def get(self, key: str, *, limit_s: float) -> bytes | None:
        if self._stop_at and key.endswith(self._stop_at):
            os.kill(os.getpid(), signal.SIGSTOP)
        path, deadline = self._path / key.replace("/", "-"), time.monotonic() + limit_s
        while True:
            if path.exists():
                return path.read_bytes()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)


def main() -> None:
    facts = json.loads(sys.argv[1])
    interface, folder = facts["interface"], Path(facts["folder"])
    baseline = folder / "baseline"
    report = LinkSession(
        member=Member(
            name=facts["name"],
            node_rank=facts["node_rank"],
            num_hosts=facts["num_hosts"],
            address=facts["address"],
            interface=interface,
            mtu=int(Path(f"/sys/class/net/{interface}/mtu").read_text()),
            ports=tuple(facts["ports"]),
        ),
        exchange=Folder(folder, stop_at=facts["stop_at"]),
        full=facts["full"],
        options=LinkOptions(roster_s=facts["roster_s"]),
        baseline=decode_baseline(baseline.read_bytes()) if baseline.exists() else None,
        wall=lambda: time.time() + facts["skew_s"],
    ).run()
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    main()
