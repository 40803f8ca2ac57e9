import threading
from pathlib import Path

import pytest

from elastictrain.errors import RunHeldError, StopRequestedError
from elastictrain.lease.chain import LAUNCHER, STALE_S, Chain, LeaseClaim, is_held
from elastictrain.lease.holder import Lease, take, wait_until_free
from elastictrain.storage.opening import open_store
from elastictrain.storage.writers import process_name
from tests.unit.lease.made import SECOND, Scene


def beating(scene: Scene, owner: str, *, until_s: float = float("inf")) -> None:
    """That owner lives, and shows it every five seconds."""

    def beat(now_s: float) -> None:
        if now_s < until_s:
            scene.beat(owner, 2 + int(now_s / 5))

    scene.meanwhile = beat


def test_nobody_holds_a_new_folder() -> None:
    scene = Scene()
    assert wait_until_free(scene.chain, "me", scene.waiting()).number == 0
    assert scene.now_s == 0


def test_an_owner_that_lives_is_named_and_the_second_ends() -> None:
    scene = Scene()
    scene.hold()
    beating(scene, "first")
    with pytest.raises(RunHeldError, match=r"17 .*1970") as raised:
        wait_until_free(scene.chain, "second", scene.waiting())
    assert raised.value.exit_code == 75
    assert scene.now_s <= 6


def test_one_that_waits_goes_on_when_the_other_is_silent() -> None:
    scene = Scene()
    scene.hold()
    beating(scene, "first", until_s=100)
    assert wait_until_free(scene.chain, "second", scene.waiting("wait")).number == 1
    assert 100 < scene.now_s <= 100 + STALE_S + 6
    assert len(scene.told) == 1


def test_one_that_waits_can_be_asked_to_stop() -> None:
    scene = Scene()
    scene.hold()

    def stop(now_s: float) -> None:
        if now_s > 3:
            raise StopRequestedError("enough")

    scene.meanwhile = stop
    with pytest.raises(StopRequestedError):
        wait_until_free(scene.chain, "second", scene.waiting("wait"))


def test_a_silent_owner_is_replaced_within_thirty_seconds() -> None:
    scene = Scene()
    scene.hold()
    wait_until_free(scene.chain, "second", scene.waiting())
    assert STALE_S <= scene.now_s < 30


@pytest.mark.parametrize("owner", ["first", "second"])
def test_one_that_has_given_back_or_is_the_same_is_not_waited_for(owner: str) -> None:
    scene = Scene()
    scene.hold(owner, gone=owner == "first")
    wait_until_free(scene.chain, "second", scene.waiting())
    assert scene.now_s == 0


def test_a_dead_process_of_this_host_is_not_waited_for(tmp_path: Path) -> None:
    living = process_name()
    dead = f"{living.rpartition('.')[0]}.1"
    chain = Chain(open_store(str(tmp_path)))
    chain.create(LeaseClaim(1, "first", "host1", 17, ("first",)))
    scene = Scene()
    for writers, waited in (((dead,), False), ((dead, living), True), ((f"other{dead}",), True)):
        scene.now_s = 0
        chain.write_sign("first", beat=1, gone=False, writers=writers)
        wait_until_free(chain, "second", scene.waiting())
        assert (scene.now_s > 0) is waited, writers


@pytest.mark.parametrize(("states", "free"), [(("gone", "gone"), True), (("gone", "busy"), False)])
def test_launchers_hold_a_run_as_long_as_one_of_them_lives(states: tuple[str, str], free: bool) -> None:
    scene = Scene()
    scene.launched()

    def lines(now_s: float) -> None:
        for host, state in zip("ab", states, strict=True):
            scene.line(host, int(now_s), state)

    lines(0)
    scene.meanwhile = lines
    if free:
        assert wait_until_free(scene.chain, "second", scene.waiting()).number == 1
    else:
        with pytest.raises(RunHeldError, match="name-a, name-b"):
            wait_until_free(scene.chain, "second", scene.waiting())
    # For another launcher it is no other run.
    assert wait_until_free(scene.chain, LAUNCHER, scene.waiting()).owner == LAUNCHER


def test_a_run_that_launchers_have_ended_is_free() -> None:
    scene = Scene()
    scene.launched(outcome="done")
    wait_until_free(scene.chain, "second", scene.waiting())
    assert scene.now_s == 0


def test_who_is_slower_to_create_meets_the_owner_that_was_faster() -> None:
    scene = Scene()
    original = scene.store.before

    def race(operation: str, key: str) -> None:
        if operation == "create" and key.endswith("000000001.json"):
            scene.store.before = original
            scene.hold("faster")
            beating(scene, "faster")

    scene.store.before = race
    with pytest.raises(RunHeldError):
        take(scene.chain, SECOND, scene.waiting(), writers=(), on_lost=lambda _: None)


def test_generations_go_on_from_those_that_had_no_owner() -> None:
    scene = Scene()
    scene.store.write("events/000009-bb-r00001.part-00001.jsonl", b"")
    scene.store.write("lineage/000000003-000012-cc.json", b"{}")
    scene.store.write("events/notes.txt", b"")
    lease = take(scene.chain, SECOND, scene.waiting(), writers=(), on_lost=lambda _: None)
    lease.close(give_back=True)
    assert lease.number == 13
    # From then on nothing but the chain is asked.
    listed: list[str] = []
    scene.store.before = lambda operation, key: listed.append(key) if operation == "list" else None
    lease = take(scene.chain, SECOND, scene.waiting(), writers=(), on_lost=lambda _: None)
    lease.close(give_back=True)
    assert (lease.number, listed) == (14, [])


def test_launchers_number_on_from_starts_without_a_launcher() -> None:
    scene = Scene()
    scene.store.write("events/000009-bb-r00001.jsonl", b"")
    assert scene.chain.ensure_last_number(scene.chain.newest()) == 9
    assert (scene.chain.newest().number, scene.chain.newest().over) == (9, True)


def held(scene: Scene, lost: list[str], done: threading.Event) -> Lease:
    def on_lost(sentence: str) -> None:
        lost.append(sentence)
        done.set()

    claim = LeaseClaim(1, "first", "host1", 17, ("first",))
    assert scene.chain.create(claim)
    return Lease(scene.chain, claim, writers=(), on_lost=on_lost, beat_s=0.01)


def test_an_owner_shows_that_it_lives_and_gives_back_what_it_held() -> None:
    scene, lost = Scene(), []
    claim = LeaseClaim(1, "first", lines=("first",))
    lease = held(scene, lost, threading.Event())
    waited = threading.Event()
    for _ in range(500):
        if (signs := scene.chain.signs(claim)) and signs["first"].beat >= 3:
            break
        waited.wait(0.01)
    assert signs["first"].state == "busy"
    # Another start by the same owner takes nothing away.
    scene.hold("first", number=2, beat=9)
    lease.close(give_back=True)
    assert (scene.chain.signs(claim)["first"].state, lost) == ("gone", [])


def test_an_owner_that_was_replaced_learns_of_it_and_shows_no_more_signs() -> None:
    scene, lost, done = Scene(), [], threading.Event()
    lease = held(scene, lost, done)
    scene.hold("second", number=2)
    assert done.wait(10)
    scene.beat("first", 0)
    lease.close(give_back=True)
    assert len(lost) == 1
    assert scene.chain.signs(LeaseClaim(1, "first", lines=("first",)))["first"].beat == 0


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"number": 1}', b'{"number": 2, "owner": "x", "host": "h", "pid": 1}'])
def test_a_damaged_record_holds_nothing(data: bytes) -> None:
    scene = Scene()
    scene.store.objects["launch/generations/000000001.json"] = data
    assert wait_until_free(scene.chain, "second", scene.waiting()).number == 1


def test_a_folder_that_was_deleted_is_not_made_again() -> None:
    scene, lost = Scene(), []
    lease = held(scene, lost, threading.Event())
    deadline, waited = 500, threading.Event()
    while deadline and "launch/hosts/first.json" not in scene.store.objects:
        waited.wait(0.01)
        deadline -= 1
    scene.store.objects.clear()
    asked = threading.Event()
    scene.store.before = lambda operation, key: asked.set() if key.endswith("000000002.json") else None
    asked.clear()
    assert asked.wait(10)
    scene.store.objects.clear()
    waited.wait(0.1)
    lease.close(give_back=True)
    assert (scene.store.objects, lost) == ({}, [])


def test_an_owner_of_whom_no_sign_can_be_read_is_not_taken_for_gone_at_once() -> None:
    assert is_held({}, {}, watched_s=0.0) is None
    assert is_held({}, {}, watched_s=STALE_S) is False
