"""Whether this host may take part: its own checks, before it tells the others that it is there."""

from dataclasses import asdict

from elastictrain.config.composed import RunConfig
from elastictrain.distributed.gpus import needs_gpu, read_gpus, why_no_gpu
from elastictrain.preflight.alone import OwnChecks, check_host, transport_checks
from elastictrain.preflight.host.checks import HostOptions
from elastictrain.preflight.host.ports import WantedPort
from elastictrain.preflight.policy import Level, describe
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import failures


def why_unfit(config: RunConfig, surroundings: Surroundings, *, processes: int) -> str:
    """Why no GPU can be used where one is needed, or the first check that failed, with its remedy; empty if all is well.

    With `preflight=off` there are no checks.
    """
    if config.parallel.backend == "nccl":
        reason = why_no_gpu(read_gpus(surroundings.environment, root=surroundings.root))
        if reason:
            return needs_gpu(reason)
    if config.preflight.level == "off":
        return ""
    asked = OwnChecks(
        # The group checks in full what has to be; this is only to keep out who would fail there at once.
        level=Level.QUICK,
        modes={**asdict(config.preflight.checks), "storage": "off"},
        options=HostOptions(
            run_dir=config.run.dir,
            memory_dir=config.checkpoint.memory_dir,
            cpus=float(config.run.num_threads * processes),
            # Nothing of the run listens here yet; in a group it is the preflight itself that does.
            ports=tuple(WantedPort(port, "checks of links", "preflight.ports") for port in config.preflight.ports),
        ),
        local_world_size=processes,
    )
    failed = failures(check_host(surroundings, asked, more=transport_checks(surroundings)))
    return describe(failed[0]) if failed else ""
