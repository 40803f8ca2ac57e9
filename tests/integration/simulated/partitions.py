"""Four hosts that all see storage, and a network between them that falls apart again and again."""

from itertools import combinations, pairwise
from random import Random

from elastictrain.config.composed import LaunchGroup
from elastictrain.launch.membership.records import EndKind
from tests.integration.simulated.storage import Weather
from tests.integration.simulated.world import STORM, BrokenPromiseError, World

NAMES = "abcd"
GOES_ON_WITHIN_S = 15
"""By the clock of a host; those of some are slow, and the simulation looks once a second."""

_SLACK = 1.5
_KNOWN_WITHIN_S = 5
"""When a generation is formed later than that after a change, its proposer had seen the change."""

_HEALED_S = 700


def play(seed: int, *, outages: int = 8) -> World:
    """One history, with the default limits. Raises: BrokenPromiseError if any of what must hold does not."""
    chance = Random(seed)
    min_hosts = chance.choice((1, 2, 3))
    world = World(NAMES, seed=seed, options=LaunchGroup(min_hosts=min_hosts), expected_hosts=len(NAMES))
    stormy = chance.random() < 0.3
    for _ in range(outages):
        _break(world, chance)
        world.storage.weather = STORM if stormy else Weather()
        # Many are over before anybody has decided anything.
        _pass(world, chance.choice((chance.randint(1, 14), chance.randint(15, 90))), strict=not stormy)
        if chance.random() < 0.5:
            _heal(world)
            _pass(world, chance.choice((chance.randint(1, 14), chance.randint(15, 60))), strict=not stormy)
    _heal(world)
    world.storage.weather = Weather()
    for _ in range(_HEALED_S):
        _tick(world)
        newest = world.newest()
        if newest is not None and len(newest.members) == len(NAMES) and world.trains():
            return world
    raise BrokenPromiseError("the hosts do not come together again")


def _break(world: World, chance: Random) -> None:
    """Into parts, or single links in both directions or one."""
    _heal(world)
    if chance.random() < 0.6:
        part = {name: chance.randint(0, 3) for name in NAMES}
        world.unheard = {frozenset(pair) for pair in combinations(NAMES, 2) if part[pair[0]] != part[pair[1]]}
        return
    for one, other in combinations(NAMES, 2):
        if chance.random() < 0.3:
            world.deaf.add(chance.choice(((one, other), (other, one))))
        elif chance.random() < 0.2:
            world.unheard.add(frozenset((one, other)))


def _heal(world: World) -> None:
    world.unheard, world.deaf = set(), set()


def _pass(world: World, seconds: int, *, strict: bool) -> None:
    """Time without a change of the network; at its end a group trains if the network lets one."""
    began, since_s = world.newest() is not None, world.now_s
    for _ in range(seconds):
        _tick(world)
    if not strict or not began or seconds < GOES_ON_WITHIN_S * _SLACK:
        return
    for _ in range(GOES_ON_WITHIN_S if _grows(world) else 0):
        _tick(world)
    largest = _largest(world)
    newest = world.newest()
    if largest < world.options.min_hosts:
        if world.trains_now():
            raise BrokenPromiseError(f"{newest} trains with fewer hosts than it must, or across a network that is out")
        return
    if newest is None or not world.trains_now():
        raise BrokenPromiseError(f"{largest} hosts hear each other, and do not train: {newest}")
    if world.created_s(newest) > since_s + _KNOWN_WITHIN_S and len(newest.members) != largest:
        raise BrokenPromiseError(f"{len(newest.members)} hosts train where {largest} could: {newest}")


def _grows(world: World) -> bool:
    """Whether the group was stopped a moment ago to start again with more hosts, which is no fault of the network."""
    newest = world.newest()
    grown = [one.record.end.generation for one in world.live() if one.record.end and one.record.end.kind is EndKind.GROW]
    if newest is None or not grown:
        return False
    just_created = world.created_s(newest) > world.now_s - GOES_ON_WITHIN_S
    return max(grown) == newest.number or (max(grown) == newest.number - 1 and just_created)


def _tick(world: World) -> None:
    world.tick()
    if len(world.live()) < len(NAMES):
        raise BrokenPromiseError(f"a launcher has ended: {world.newest()}")
    if any(later < earlier for earlier, later in pairwise(world.committers[-3:])):
        raise BrokenPromiseError(f"two groups commit at once: generations {world.committers[-3:]}")


def _largest(world: World) -> int:
    return max(size for size in range(1, 5) for names in combinations(NAMES, size) if world.connected(names))
