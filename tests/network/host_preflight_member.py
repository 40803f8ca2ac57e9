"""One host's preflight without torchrun: words are left in a folder that all hosts share. Prints verdicts, ends with the code.

Arguments: name, node rank, names of all hosts with commas, address of the first, level, run.dir, port, folder.
"""

import os
import sys
from pathlib import Path

from word_folder import WordFolder

from elastictrain.config.preflight import PreflightGroup
from elastictrain.preflight.host_checks import OwnChecks
from elastictrain.preflight.host_preflight import HostLayout, HostPreflight
from elastictrain.preflight.policy import Level
from elastictrain.preflight.verdict import show


def main() -> int:
    name, node_rank, names, first, level, run_dir, port, folder = sys.argv[1:]
    layout = HostLayout(
        hosts=tuple(names.split(",")), node_rank=int(node_rank), local_rank=0, local_world_size=1, rendezvous=first
    )
    settings = PreflightGroup(wait_s=float(os.environ.get("WAIT_S", "20")), ports=(int(port),))
    own = OwnChecks(level=Level(level), settings=settings, run_dir=run_dir, several_hosts=True, towards=first)
    report = HostPreflight(layout=layout, own=own, exchange=WordFolder(Path(folder))).check()
    if layout.node_rank == 0:
        show(report.verdicts, as_json=True)
        sys.stdout.write(f"seconds {report.seconds:.3f}\n")
    if report.error is None:
        return 0
    sys.stderr.write(f"elastictrain: {name}: {report.error}\n")
    return report.error.exit_code


if __name__ == "__main__":
    sys.exit(main())
