"""Random histories of several launchers: what must hold in each of them, and that the simulation sees it where it does not."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastictrain.config.composed import LaunchGroup
from elastictrain.errors import EXIT_BUG, EXIT_OK, EXIT_STOPPED
from elastictrain.launch.membership.decide import decide
from elastictrain.launch.membership.observation import ClusterState
from elastictrain.launch.membership.records import Decision, GenerationOutcome, Wait
from tests.integration.simulated.faults import CHAOS_S, DEEDS, NAMES, Fault, options, plans, recover, suffer
from tests.integration.simulated.world import STORM, BrokenPromiseError, World

seeds = st.integers(0, 2**32)


def histories(num: int) -> settings:
    return settings(max_examples=num, deadline=None, suppress_health_check=list(HealthCheck))


def staying(world: World) -> int:
    return sum(not launcher.wants_to_leave for launcher in world.live())


def story(world: World) -> str:
    lines = [f"newest: {world.newest()}"]
    for launcher in world.live():
        lines.append(
            f"{launcher.host}: {launcher.record.state} ended {launcher.record.ended}, {launcher.attempt}, {launcher.silent}"
        )
        lines.append(f"   {decide(launcher.cluster(world.now_s), world.options)}")
    return "\n".join(lines)


def world_of(seed: int, *, launch: LaunchGroup, total_steps: int = 10**9) -> World:
    """Half of all histories begin in a storm, and in half of them the cluster says how many hosts there are."""
    world = World(NAMES, seed=seed, options=launch, total_steps=total_steps, expected_hosts=seed // 2 % 2 * len(NAMES))
    if seed % 2:
        world.storage.weather = STORM
    return world


_TWO_SLOW = [Fault(1, "slow", "b"), Fault(6, "slow", "c"), Fault(14, "kill", "d"), Fault(23, "kill", "a")]


@histories(600)
@example(plan=_TWO_SLOW, seed=224, min_hosts=2, max_hosts=3)
@given(plan=plans, seed=seeds, min_hosts=st.integers(1, 3), max_hosts=st.sampled_from((0, 3)))
def test_there_is_one_history_and_training_goes_on(plan: Sequence[Fault], seed: int, min_hosts: int, max_hosts: int) -> None:
    world = world_of(seed, launch=options(min_hosts=min_hosts, max_hosts=max_hosts))
    suffer(world, plan)
    if staying(world) >= min_hosts:
        assert recover(world, num_hosts=min_hosts, within_s=60), story(world)


@histories(150)
@given(plan=plans, seed=seeds, max_hosts=st.sampled_from((0, 2)))
def test_all_hosts_that_are_there_are_taken_in(plan: Sequence[Fault], seed: int, max_hosts: int) -> None:
    world = world_of(seed, launch=options(max_hosts=max_hosts))
    suffer(world, plan)
    num_hosts = min(staying(world), max_hosts or len(NAMES))
    if num_hosts:
        assert recover(world, num_hosts=num_hosts, within_s=120), story(world)


@histories(150)
@given(plan=plans, seed=seeds, max_failures=st.sampled_from((1, 3)))
def test_a_run_comes_to_its_end_and_its_launchers_too(plan: Sequence[Fault], seed: int, max_failures: int) -> None:
    world = world_of(seed, launch=options(max_failures=max_failures), total_steps=25)
    suffer(world, plan)
    for _ in range(150):
        if not world.live():
            break
        world.tick()
    assert not world.live(), story(world)
    codes = {launcher.exit_code for launcher in world.all.values()} - {None}
    assert codes <= {EXIT_OK, EXIT_STOPPED, EXIT_BUG}
    over = {one.outcome for versions in world.storage.generations.rows.values() for _, one in versions if one.terminal}
    assert (EXIT_OK in codes) <= (GenerationOutcome.DONE in over)
    assert (EXIT_BUG in codes) <= (GenerationOutcome.GIVE_UP in over)


def until_it_commits(world: World) -> None:
    before = world.committed_step()
    for _ in range(600):
        world.tick()
        if world.committed_step() > before:
            return
    raise AssertionError(story(world))


@pytest.mark.parametrize("seed", range(20))
def test_links_that_are_out_for_seconds_never_end_a_run_that_commits_in_between(seed: int) -> None:
    world = World(NAMES, seed=seed, options=LaunchGroup(min_hosts=2), expected_hosts=len(NAMES))
    random = Random(seed)
    for _ in range(20):
        until_it_commits(world)
        name = random.choice(NAMES)
        world.unheard = {frozenset((name, other)) for other in NAMES if other != name}
        for _ in range(random.randint(3, 10)):
            world.tick()
            if random.random() < 0.2:
                world.launchers[random.choice(NAMES)].workers_end(71, now_s=world.now_s)
        world.unheard = set()
    until_it_commits(world)
    assert len(world.live()) == len(NAMES)


def test_undisturbed_hosts_train_in_one_generation_to_the_end() -> None:
    world = World(NAMES, seed=1, options=options(min_hosts=4), total_steps=25)
    while world.live():
        world.tick()
        assert world.now_s < 100
    assert [launcher.exit_code for launcher in world.all.values()] == [EXIT_OK] * 4
    assert len(world.storage.generations.rows) == 2
    assert len(world.resumes) == 1


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_host_that_vanishes_is_replaced_within_seconds(first: str) -> None:
    world = World("abc", seed=3, options=options(), expected_hosts=3)
    while not world.trains():
        world.tick()
    vanished_s = world.now_s
    world.kill(first, silently=True)
    while not all(one.attempt is not None and one.attempt.generation.number == 2 for one in world.live()):
        world.tick()
    # Noticed after 4 s, waited for during 4 s more; the others' clocks may be slow.
    assert world.now_s - vanished_s <= 12


def deaf(cluster: ClusterState, launch: object) -> Decision:
    """Does not stop what is not the newest generation any more."""
    if cluster.running is not None and cluster.newest is not None and cluster.newest.number > cluster.running.number:
        return Wait()
    return decide(cluster, launch)  # type: ignore[arg-type]


def breaks(**broken: object) -> bool:
    """Whether any of many histories shows it."""
    for seed in range(150):
        random = Random(seed)
        plan = [Fault(random.randint(1, CHAOS_S), random.choice(DEEDS), random.choice(NAMES)) for _ in range(12)]
        world = World(NAMES, seed=seed, options=options(), **broken)  # type: ignore[arg-type]
        world.storage.weather = STORM
        try:
            suffer(world, plan)
        except BrokenPromiseError:
            return True
    return False


def test_the_simulation_sees_a_store_that_does_not_create_atomically() -> None:
    assert breaks(atomic=False)


def test_a_host_that_thaws_after_it_was_replaced_stops_and_is_taken_in_again() -> None:
    world = World(NAMES, seed=5, options=options(), expected_hosts=4)
    suffer(world, [Fault(10, "freeze host", "b"), Fault(25, "thaw", "b")])
    assert recover(world, num_hosts=4, within_s=60), story(world)
    assert not any(launcher.gone for launcher in world.all.values())


def test_the_simulation_sees_hosts_that_do_not_stop() -> None:
    world = World(NAMES, seed=5, options=options(), expected_hosts=4, decide_by=deaf)
    with pytest.raises(BrokenPromiseError, match="b1 knows of 2 and trains on"):
        suffer(world, [Fault(10, "freeze host", "b"), Fault(11, "unhear", "b"), Fault(25, "thaw", "b")])


def test_the_simulation_sees_histories_that_are_mixed() -> None:
    assert breaks(stale=lambda commit, resumes: False)


def slow_ones_left_out(world: World) -> list[str]:
    """The hosts that were left out for being slow, in order."""
    ends = [one.slow for _, versions in sorted(world.storage.generations.rows.items()) for _, one in versions if one.slow]
    return [world.all[end.host].name for end in dict.fromkeys(ends)]


def train(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.tick()


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_slow_by_its_work_takes_out_one_host_at_most(seed: int) -> None:
    world = World(NAMES, seed=seed, options=options(retry_s=10.0**6), expected_hosts=4)
    for launcher in world.all.values():
        launcher.first_is_slow = True
    train(world, 300)
    assert len(slow_ones_left_out(world)) == 1
    newest = world.newest()
    assert newest is not None
    assert (len(newest.members), world.trains()) == (3, True), story(world)


@pytest.mark.parametrize("seed", range(20))
def test_slow_hosts_are_left_out_one_at_a_time(seed: int) -> None:
    world = World(NAMES, seed=seed, options=options(min_hosts=2, retry_s=100.0), expected_hosts=4)
    for name in "abcd":
        world.launchers[name].is_slow = True
    train(world, 90)
    assert len(slow_ones_left_out(world)) == 1
    assert recover(world, num_hosts=2, within_s=400), story(world)


@pytest.mark.parametrize("retry_s", [0.0, 10.0**6])
@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_was_left_out_for_being_slow_trains_when_the_others_are_lost(seed: int, retry_s: float) -> None:
    """They are lost while it leaves; where it waits to be checked again, also later."""
    world = World("ab", seed=seed, options=options(retry_s=retry_s), expected_hosts=2)
    while not world.trains():
        world.tick()
    world.launchers["b"].is_slow = True
    while world.launchers["b"].record.end is None:
        world.tick()
    train(world, Random(seed).randint(0, 2 if retry_s == 0 else 60))
    world.kill("a", silently=True)
    world.launchers["b"].is_slow = False
    assert recover(world, num_hosts=1, within_s=60), story(world)
