"""Decides whether the timeouts form a ladder: what is waited for must end before what waits for it gives up."""

from elastictrain.config.fault import FaultGroup
from elastictrain.config.preflight import PreflightGroup
from elastictrain.errors import Problem

TORCHRUN_KILL_S = 30.0
"""torchrun kills its workers this long after asking them to end, whatever its own option says, when it restarts a group."""


def check_ladder(fault: FaultGroup, *, preflight: PreflightGroup) -> list[Problem]:
    """Every rung that is out of order."""
    problems = []
    rungs = (
        ("heartbeat_s", "<", "step_timeout_s", "a rank must be heard several times before it counts as hung"),
        ("heartbeat_s", "<", "rendezvous_timeout_s", "a rank must be heard before the others stop waiting for it"),
        ("heartbeat_s", "<", "hang_floor_s", "a rank must be heard several times before its silence counts"),
        ("step_timeout_s", "<=", "init_timeout_s", "the first step also starts up, restores and compiles"),
        ("step_timeout_s", "<", "save_timeout_s", "a save writes all state to storage, a step does not"),
        ("shutdown_grace_s", "<", "notice_s", "an orderly end must be over before this host is taken away"),
    )
    for lower, relation, upper, reason in rungs:
        low, high = getattr(fault, lower), getattr(fault, upper)
        if low > high or (low == high and relation == "<"):
            message = f"must be {relation} `fault.{upper}` = {high:g}, but is {low:g}: {reason}"
            problems.append(Problem(f"fault.{lower}", message))
    if fault.shutdown_grace_s >= TORCHRUN_KILL_S:
        message = f"must be < {TORCHRUN_KILL_S:g}, but is {fault.shutdown_grace_s:g}: torchrun kills its workers after that"
        problems.append(Problem("fault.shutdown_grace_s", message))
    if preflight.level == "off":
        return problems
    limits = (
        ("wait_s", f"`preflight.limit_s` = {preflight.limit_s:g}", preflight.limit_s, "waiting is a part of it"),
        ("limit_s", f"`fault.init_timeout_s` = {fault.init_timeout_s:g}", fault.init_timeout_s, "it names what hangs before"),
    )
    for name, upper, high, reason in limits:
        if (low := getattr(preflight, name)) >= high:
            problems.append(Problem(f"preflight.{name}", f"must be < {upper}, but is {low:g}: {reason}"))
    warn_s, fail_s = preflight.thresholds.clock_warn_s, preflight.thresholds.clock_fail_s
    if warn_s > fail_s:
        message = f"must be <= `preflight.thresholds.clock_fail_s` = {fail_s:g}, but is {warn_s:g}"
        problems.append(Problem("preflight.thresholds.clock_warn_s", message))
    return problems
