"""A cloud's metadata service at the address that it has on every machine of that cloud, which it is to take away.

python metadata_host.py CLOUD SECONDS FILE     (says nothing of it until FILE exists; then SECONDS are left)
"""

import json
import sys
import time
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path

from elastictrain.fault.clouds import AWS_ACTION, AZURE_EVENTS, AZURE_NAME, GCP_MAINTENANCE, GCP_PREEMPTED
from tests.unit.fault.metadata_servers import FakeAws, FakeAzure, FakeCloud, FakeGcp, serving

ADDRESS = ("169.254.169.254", 80)
NAME = "west-3"


def quiet(cloud: str) -> FakeCloud:
    """As it is when nothing is to come."""
    if cloud == "aws":
        return FakeAws()
    if cloud == "gcp":
        return FakeGcp(items={GCP_PREEMPTED: b"FALSE", GCP_MAINTENANCE: b"NONE"})
    return FakeAzure(items={AZURE_NAME: NAME.encode(), AZURE_EVENTS: b'{"DocumentIncarnation": 1, "Events": []}'})


def notice(cloud: str, *, left_s: float) -> dict[str, bytes]:
    """What it says of a machine that it takes in `left_s`; Google Cloud does not name the time."""
    when = time.time() + left_s
    if cloud == "aws":
        told = {"action": "terminate", "time": datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        return {AWS_ACTION: json.dumps(told).encode()}
    if cloud == "gcp":
        return {GCP_PREEMPTED: b"TRUE"}
    event = {"EventType": "Preempt", "Resources": [NAME], "NotBefore": formatdate(when, usegmt=True)}
    return {AZURE_EVENTS: json.dumps({"DocumentIncarnation": 2, "Events": [event]}).encode()}


def main() -> None:
    cloud, left_s, file = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    with serving(quiet(cloud), address=ADDRESS) as served:
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        while not file.exists():
            time.sleep(0.1)
        served.items |= notice(cloud, left_s=left_s)
        while True:
            time.sleep(1.0)


if __name__ == "__main__":
    main()
