"""One host's part in the link checks, for the network tests: words are files in a folder that all hosts see.

python link_member.py FACTS     (JSON: see `Facts` in faults.py; prints the report as JSON in its last line)
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from word_folder import WordFolder

from elastictrain.preflight.links.messages import HostIntroduction
from elastictrain.preflight.links.probes import LinkOptions
from elastictrain.preflight.links.session import LinkSession


def main() -> None:
    facts = json.loads(sys.argv[1])
    interface, folder = facts["interface"], Path(facts["folder"])
    report = LinkSession(
        host=HostIntroduction(
            name=facts["name"],
            node_rank=facts["node_rank"],
            address=facts["address"],
            interface=interface,
            mtu=int(Path(f"/sys/class/net/{interface}/mtu").read_text()),
            tcp_ports=tuple(facts["ports"]),
        ),
        names=tuple(f"h{rank + 1}" for rank in range(facts["num_hosts"])),
        exchange=WordFolder(folder, stop_at=facts["stop_at"]),
        full=facts["full"],
        options=LinkOptions(roster_s=facts["roster_s"]),
        wall=lambda: time.time() + facts["skew_s"],
    ).run()
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    main()
