"""What can happen to hosts, and plans of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from elastictrain.config.composed import LaunchGroup
from tests.integration.simulated.storage import Weather
from tests.integration.simulated.world import STORM, World

NAMES = "abcd"
CHAOS_S = 40
DEEDS = (
    "crash",
    "kill",
    "vanish",
    "freeze host",
    "freeze launcher",
    "thaw",
    "unhear",
    "cut off",
    "heal",
    "restart",
    "leave",
    "unfit",
    "slow",
    "storm",
    "calm",
)

_EXIT_CODES = {"crash": 137, "unfit": 69}


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: int
    deed: str
    name: str


plans = st.lists(
    st.builds(Fault, at_s=st.integers(1, CHAOS_S), deed=st.sampled_from(DEEDS), name=st.sampled_from(NAMES)), max_size=14
)


def options(*, min_hosts: int = 1, max_hosts: int = 0, max_failures: int = 10**6, retry_s: float = 10.0) -> LaunchGroup:
    """Impatient ones, so that much happens in little time."""
    return LaunchGroup(
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        join_s=3.0,
        wait_s=0.0,
        grow_after_s=3.0,
        grow_every_s=10.0,
        max_failures=max_failures,
        backoff_s=0.0,
        retry_unfit_s=retry_s,
    )


def suffer(world: World, plan: Sequence[Fault]) -> None:
    """The faults of the plan, in their order. After that all is well again, but what is dead stays dead."""
    for second in range(1, CHAOS_S + 1):
        for fault in plan:
            if fault.at_s == second:
                _do(world, fault)
        world.tick()
    world.storage.weather = Weather()
    for name in world.names:
        _heal(world, name)
        world.launchers[name].frozen, world.launchers[name].is_slow = "", False


def recover(world: World, *, num_hosts: int, within_s: int) -> bool:
    """Whether, within that time, at least so many hosts train together and go on to do so."""
    steady = 0
    for _ in range(within_s):
        world.tick()
        newest = world.newest()
        steady = steady + 1 if newest is not None and world.trains() and len(newest.members) >= num_hosts else 0
        if steady > 3:
            return True
    return False


def _do(world: World, fault: Fault) -> None:
    launcher = world.launchers[fault.name]
    match fault.deed:
        case "crash" | "unfit":
            launcher.workers_end(_EXIT_CODES[fault.deed], now_s=world.now_s)
        case "kill" | "vanish":
            world.kill(fault.name, silently=fault.deed == "vanish")
        case "freeze host" | "freeze launcher" | "thaw":
            launcher.frozen = fault.deed.partition("freeze ")[2]
        case "unhear":
            world.unheard.update(frozenset((fault.name, name)) for name in NAMES if name != fault.name)
        case "cut off":
            world.cut_off.add(fault.name)
        case "heal":
            _heal(world, fault.name)
        case "restart":
            world.start(fault.name)
        case "leave":
            launcher.wants_to_leave = True
        case "slow":
            launcher.is_slow = not launcher.is_slow
        case "storm" | "calm":
            world.storage.weather = STORM if fault.deed == "storm" else Weather()


def _heal(world: World, name: str) -> None:
    world.cut_off.discard(name)
    world.unheard = {pair for pair in world.unheard if name not in pair}
