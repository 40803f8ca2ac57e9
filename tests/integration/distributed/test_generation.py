import json
import re
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.distributed.generation import (
    AgreedGeneration,
    Introduction,
    KeepWaiting,
    agree,
    check_alike,
    coordinate,
    signal_waiting,
)
from elastictrain.distributed.store import get_pieces, put_pieces
from elastictrain.errors import ConfigError, StopRequestedError, TransportError
from elastictrain.identity import Identity
from tests.integration.distributed.stage import Actor, Stage, introduction_of

SEEDS = range(25)
HERE = Introduction("here", 1, "gloo", "digest")


def enter_all(stage: Stage, world_size: int, *, number: int = 1, without: tuple[int, ...] = ()) -> list[Actor]:
    return [stage.enter(rank, world_size=world_size, number=number) for rank in range(world_size) if rank not in without]


def names(actors: list[Actor]) -> set[str]:
    return {actor.result.name for actor in actors if actor.result is not None}


def leftovers(*world_sizes: int) -> dict[str, bytes]:
    """The shared store after groups of these sizes, one after another."""
    return dict(_store_after(world_sizes))


@cache
def _store_after(world_sizes: tuple[int, ...]) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for world_size in world_sizes:
        stage = Stage(0, data=data)
        assert len(names(enter_all_and_play(stage, world_size))) == 1
    return data


def enter_all_and_play(stage: Stage, world_size: int, *, number: int = 1) -> list[Actor]:
    actors = enter_all(stage, world_size, number=number)
    stage.play()
    return actors


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_agree_on_one_name_and_know_each_other(world_size: int) -> None:
    for seed in SEEDS:
        actors = enter_all_and_play(Stage(seed), world_size, number=7)
        assert [actor.error for actor in actors] == [None] * world_size
        assert len(names(actors)) == 1
        for actor in actors:
            assert actor.result is not None
            assert re.fullmatch(r"000007-[0-9a-f]{8}", actor.result.name)
            assert actor.result.ranks == tuple(map(introduction_of, range(world_size)))
            assert actor.result.hosts == tuple(f"host-{rank}" for rank in range(world_size))


@pytest.mark.parametrize("before", [(3,), (2,), (5,), (3, 3), (5, 1, 3)])
def test_what_predecessors_left_in_the_store_disturbs_nobody(before: tuple[int, ...]) -> None:
    for seed in SEEDS:
        data = leftovers(*before)
        old = {key for key in data if "/go/" in key}
        actors = enter_all_and_play(Stage(seed, data=data), 3, number=2)
        assert [actor.error for actor in actors] == [None] * 3
        assert len(names(actors)) == 1
        assert not any(key.endswith(name) for key in old for name in names(actors))


def test_ranks_may_be_late() -> None:
    for seed in SEEDS:
        stage = Stage(seed, data=leftovers(3))
        actors = []
        for rank in stage.random.sample(range(3), 3):
            actors.append(stage.enter(rank, world_size=3))
            stage.play(turns=stage.random.randrange(60))
        stage.play()
        assert len(names(actors)) == 1
        assert all(actor.result for actor in actors)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_replaced_in_the_middle_leaves_nobody_with_another_name(rank: int) -> None:
    """If the go was not given yet, all agree in the end; otherwise the newcomer waits in vain, and never with another name."""
    complete = 0
    for seed in range(60):
        stage = Stage(seed, data=leftovers(3))
        actors = enter_all(stage, 3)
        stage.play(turns=stage.random.randrange(70))
        victim = actors[rank]
        stage.kill(victim)
        actors[rank] = stage.enter(rank, world_size=3)
        stage.play()
        assert len(names([*actors, victim])) <= 1 or victim.result is not None
        assert len(names(actors)) <= 1
        left = [actor for actor in actors if actor.result is not None]
        complete += len(left) == 3
        assert len(left) in (0, 1, 2, 3)
        if len(left) < 3:
            assert isinstance(actors[rank].error, TransportError)
    assert complete > 20


def test_several_replacements_in_a_row_end_in_agreement() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        actors = enter_all(stage, 3, without=(2,))
        for _ in range(4):
            # Rank 2 never gets as far as to acknowledge, so the go cannot have been given.
            victim = stage.enter(2, world_size=3)
            stage.play(turns=stage.random.randrange(5))
            stage.kill(victim)
            stage.play(turns=stage.random.randrange(40))
        actors.append(stage.enter(2, world_size=3))
        if actors[0].result is None:
            stage.play()
            assert [actor.error for actor in actors] == [None] * 3
            assert len(names(actors)) == 1


@pytest.mark.parametrize("dead", [(1,), (2, 3)])
@pytest.mark.parametrize("before", [(), (4,)])
def test_nobody_leaves_without_a_dead_rank_and_rank_0_names_it(dead: tuple[int, ...], before: tuple[int, ...]) -> None:
    stage = Stage(1, data=leftovers(*before))
    actors = enter_all(stage, 4, without=dead)
    stage.play()
    assert not names(actors)
    # A predecessor's hello is taken for a rank that is there, until it does not acknowledge.
    stage_text = "acknowledge" if before else "hello"
    assert isinstance(actors[0].error, TransportError)
    assert actors[0].error.missing == dead
    assert stage_text in str(actors[0].error)
    assert all(isinstance(actor.error, TransportError) for actor in actors)


def test_an_acknowledgement_counts_for_its_proposal_only() -> None:
    """Rank 1 acknowledges and dies; the late rank 2 makes another proposal necessary, which a dead rank cannot acknowledge."""
    stage = Stage(1, data=leftovers(3))
    actors = enter_all(stage, 3, without=(2,))
    stage.play(turns=100)
    stage.kill(actors[1])
    late = stage.enter(2, world_size=3)
    stage.play()
    assert not names([*actors, late])
    assert isinstance(actors[0].error, TransportError)
    assert actors[0].error.missing == (1,)
    assert "acknowledge" in str(actors[0].error)


def test_a_dead_rank_0_is_named_by_the_others() -> None:
    stage = Stage(1)
    actors = enter_all(stage, 3, without=(0,))
    stage.play()
    for actor in actors:
        assert isinstance(actor.error, TransportError)
        assert actor.error.missing == (0,)
        assert f"rank {actor.identity.rank} on {actor.identity.host}" in str(actor.error)


def test_a_rank_that_waits_only_for_others_says_so() -> None:
    stage = Stage(1, data=leftovers(3))
    actors = enter_all(stage, 3, without=(2,))
    stage.play()
    assert "waits" in str(actors[1].error)


def test_whoever_polls_may_leave_early() -> None:
    def stop() -> None:
        raise StopRequestedError("SIGTERM")

    stage = Stage(0)
    actor = stage.enter(1, world_size=2, poll=stop)
    stage.play()
    assert isinstance(actor.error, StopRequestedError)


def test_a_world_of_one_agrees_through_a_store_of_torch() -> None:
    store = dist.HashStore()
    identity = Identity(0, 1, 0, 1, "here", launched=False)
    lives = [agree(store, identity, HERE, number=number, timeout_s=5.0) for number in (1, 2, 3)]
    assert [life.name[:7] for life in lives] == ["000001-", "000002-", "000003-"]
    assert len({life.name for life in lives}) == 3
    assert {life.ranks for life in lives} == {(HERE,)}


def test_a_rank_0_whose_place_was_taken_leaves_and_the_other_agrees_with_one_of_the_two() -> None:
    """An agent that gave up on a rank 0 which could not be ended starts another one; the first may wake up at any moment."""
    taken = 0
    for seed in range(40):
        stage = Stage(seed, data=leftovers(2))
        zombie = stage.enter(0, world_size=2)
        other = stage.enter(1, world_size=2)
        stage.play(turns=stage.random.randrange(40))
        successor = stage.enter(0, world_size=2)
        stage.play()
        assert other.result is not None, f"{seed}: {other.error}"
        if zombie.error is not None:
            taken += 1
            assert isinstance(zombie.error, TransportError)
            assert "rank 0" in str(zombie.error)
        if successor.result is not None:
            assert names([successor, other]).isdisjoint(names([zombie]))
            assert successor.result == other.result
        else:
            # The first had given the go before its place was taken.
            assert isinstance(successor.error, TransportError)
            assert names([zombie]) <= names([other])
    assert taken > 10


def test_a_proposal_that_comes_after_the_go_is_not_joined() -> None:
    """Rank 0 looks at the proposal before it gives the go, and another one can write over it right after."""
    store = dist.HashStore()
    nonce = ""

    def propose(name: str) -> None:
        proposal = {"name": name, "nonces": ["of rank 0", nonce], "ranks": [asdict(HERE)] * 2}
        put_pieces(store, f"elastictrain/proposal/{name}", json.dumps(proposal).encode())
        store.set("elastictrain/proposal", name)

    def rank_0(seconds: float) -> None:
        nonlocal nonce
        if not nonce:
            nonce = json.loads(store.get("elastictrain/hello/1"))["nonce"]
            propose("000001-aa")
        elif store.check(["elastictrain/ack/000001-aa/1"]):
            store.set("elastictrain/go/000001-aa", "")
            propose("000001-bb")

    identity = Identity(1, 2, 0, 1, "here", launched=True)
    agreed = agree(store, identity, HERE, number=1, timeout_s=5.0, sleep=rank_0)
    assert agreed == AgreedGeneration("000001-aa", (HERE, HERE))


def incarnation_of(*ranks: Introduction) -> AgreedGeneration:
    return AgreedGeneration("000001-aa", ranks)


def test_ranks_that_were_told_the_same_are_alike_however_uneven_their_hosts() -> None:
    check_alike(incarnation_of(HERE))
    check_alike(incarnation_of(HERE, replace(HERE, host="there", local_world_size=5)))


def test_ranks_that_differ_are_named_with_what_differs() -> None:
    blind = replace(HERE, host="blind", backend="nccl")
    stale = replace(HERE, host="stale", digest="other")
    with pytest.raises(ConfigError) as caught:
        check_alike(incarnation_of(HERE, HERE, blind, stale))
    backend, digest = caught.value.problems
    assert backend.key == "parallel.backend"
    assert backend.message.startswith("is nccl for rank 2 on blind, but gloo for rank 0 on here")
    assert digest.key == "configuration or data"
    assert digest.message.startswith("differ between rank 3 on stale and rank 0 on here")


@pytest.mark.parametrize(
    ("sizes", "shared"), [((1,), 1), ((8,), 8), ((8, 8), 8), ((8, 4), 4), ((4, 8), 4), ((6, 4), 2), ((8, 3), 1)], ids=str
)
def test_the_shared_local_size_divides_every_host(sizes: tuple[int, ...], shared: int) -> None:
    ranks = [Introduction(f"host-{host}", size, "gloo", "d") for host, size in enumerate(sizes) for _ in range(size)]
    assert incarnation_of(*ranks).shared_local_size == shared


nonces = st.sampled_from("abc")


@given(
    world_size=st.integers(1, 4),
    hellos=st.dictionaries(st.integers(0, 6), nonces),
    proposed=st.none() | st.lists(nonces, max_size=4).map(tuple),
    acknowledged=st.frozensets(st.integers(0, 6)),
)
def test_rank_0_waits_then_publishes_then_waits_then_goes(
    world_size: int, hellos: dict[int, str], proposed: tuple[str, ...] | None, acknowledged: frozenset[int]
) -> None:
    ranks = range(world_size)
    decision = coordinate(hellos, world_size=world_size, proposed=proposed, acknowledged=acknowledged)
    silent = tuple(rank for rank in ranks if rank not in hellos)
    current = tuple(hellos.get(rank, "") for rank in ranks)
    pending = tuple(rank for rank in ranks if rank not in acknowledged)
    if silent:
        assert decision == KeepWaiting(silent, "say hello")
    elif current != proposed:
        assert decision == "publish"
    elif pending:
        assert decision == KeepWaiting(pending, "acknowledge")
    else:
        assert decision == "go"


def test_a_large_group_meets_in_few_pieces() -> None:
    store = dist.HashStore()
    ranks = [{"nonce": f"{rank:032x}", "host": f"host{rank}", "digest": "d" * 64} for rank in range(512)]
    put_pieces(store, "proposal", json.dumps(ranks).encode())
    assert 2 <= int(store.get("proposal")) < 40
    assert json.loads(get_pieces(store, "proposal")) == ranks


def test_whoever_is_waited_for_is_told_once_before_the_wait_is_over() -> None:
    told: list[str] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 1.0

    identity = Identity(0, 2, 0, 1, "a", launched=True)
    with pytest.raises(TransportError):
        agree(dist.HashStore(), identity, HERE, number=1, timeout_s=30.0, tell=told.append, clock=lambda: now[0], sleep=sleep)
    (words,) = told
    assert "rank(s) 1" in words


def test_others_wait_as_long_as_rank_0_says_that_it_waits_for_another_run() -> None:
    store, now, extend_deadline = dist.HashStore(), [0.0], list[float]()
    # Of an earlier start: it says nothing.
    signal_waiting(store)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] < 100:
            signal_waiting(store)

    with pytest.raises(TransportError) as caught:
        agree(
            store,
            Identity(1, 2, 0, 1, "b", launched=True),
            HERE,
            number=0,
            timeout_s=5.0,
            extend_deadline=extend_deadline.append,
            clock=lambda: now[0],
            sleep=sleep,
        )
    assert caught.value.missing == (0,)
    assert 100 < now[0] < 125
    assert len(extend_deadline) >= 9


@pytest.mark.parametrize(
    ("come", "said_hello", "missing"), [((0,), (), (1, 2)), ((1,), (), (0, 2)), ((0, 1), (), (2,)), ((1, 2), (0,), (0,))]
)
def test_each_rank_knows_which_ranks_it_did_not_meet(
    come: tuple[int, ...], said_hello: tuple[int, ...], missing: tuple[int, ...]
) -> None:
    """Where all said hello the first rank is to blame: it gives no go."""
    stage = Stage(0, data={f"elastictrain/hello/{rank}": b"" for rank in said_hello})
    actors = [stage.enter(rank, world_size=3) for rank in come]
    stage.play()
    for actor in actors:
        assert isinstance(actor.error, TransportError)
        assert actor.error.missing == missing


def test_what_is_known_of_the_processes_of_a_generation() -> None:
    new, survivor, standby = HERE, replace(HERE, pid=72, stayed=True), replace(HERE, pid=73)
    agreed = AgreedGeneration("000002-bb", (replace(new, pid=71), survivor, standby))
    assert (agreed.pids, agreed.hosts_that_stayed) == ({"0": 71, "1": 72, "2": 73}, {HERE.host})
    fresh = AgreedGeneration("000001-aa", (new, new))
    assert fresh.hosts_that_stayed == frozenset()


def test_who_records_a_recovery_and_where_a_preflight_has_been() -> None:
    came, knows = replace(HERE, host="new"), replace(HERE, host="old", planned=True, recovers=True)
    agreed = AgreedGeneration("000002-bb", (came, knows, knows))
    assert (agreed.recovery_rank, agreed.planned_hosts) == (1, {"old"})
    assert AgreedGeneration("000001-aa", (came, came)).recovery_rank == 0
