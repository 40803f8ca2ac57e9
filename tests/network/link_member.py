"""One host's part in the link checks, for the network tests: words are files in a folder that all hosts see.

python link_member.py FACTS     (JSON: see `LinkFacts` in faults.py; prints its verdicts as JSON in its last line)
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
    seconds = time.time() - (folder / "links-roster").stat().st_mtime
    orders = [json.loads(path.read_text()) for path in folder.glob("links-order-*")]
    num_rounds = sum(order["measure"] for order in orders)
    said = {"verdicts": [asdict(one) for one in report.verdicts], "seconds": seconds, "num_rounds": num_rounds}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
