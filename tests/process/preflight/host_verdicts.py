"""Runs the checks of a host in a process of its own, and prints their verdicts; one argument of JSON."""

import json
import resource
import sys
import time
from dataclasses import asdict

began = time.monotonic()

from elastictrain.config.preflight import PreflightGroup, PreflightLimits  # noqa: E402
from elastictrain.preflight import host_checks  # noqa: E402
from elastictrain.preflight.host_checks import HostFacts, OwnChecks, own_checks, run_checks  # noqa: E402
from elastictrain.preflight.policy import Level  # noqa: E402
from elastictrain.surroundings import Surroundings  # noqa: E402

order = json.loads(sys.argv[1])
for name, value in order["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
surroundings = Surroundings()
loaded = time.monotonic()
settings = PreflightGroup(limits=PreflightLimits(storage_s=order["storage_s"]))
asked = OwnChecks(level=Level.FULL, settings=settings, **order["options"])
host_checks.HostFacts.uses_rdma = lambda _: order["rdma"]
verdicts = run_checks(own_checks(HostFacts(surroundings, asked)), subject=surroundings.host)
said = {
    "verdicts": [asdict(verdict) for verdict in verdicts],
    "loading_s": loaded - began,
    "checks_s": time.monotonic() - loaded,
    "modules": sorted(sys.modules),
}
sys.stdout.write(json.dumps(said))
