import pytest

from elastictrain.checkpoint.lineage import Fence, Lineage, ResumeOrigin
from elastictrain.errors import LeaseLostError
from tests.unit.checkpoint.fakes import Bench, FakeStore
from tests.unit.lease.made import Scene

INCARNATION = "000003-aa"


def test_a_commit_costs_one_read_as_long_as_nothing_is_newer() -> None:
    scene = Scene()
    scene.hold(number=3)
    fence, operations = Fence(scene.store), []
    scene.store.before = lambda operation, key: operations.append((operation, key))
    fence.check(INCARNATION, step=5)
    fence.check(INCARNATION, step=6)
    assert operations == [("read", "launch/generations/000000004.json")] * 2


@pytest.mark.parametrize("own", [True, False])
def test_another_owner_refuses_a_commit_even_if_a_third_one_follows(own: bool) -> None:
    scene = Scene()
    if own:
        scene.hold(number=3)
    scene.hold("second", number=4)
    scene.hold("first", number=5, beat=7)
    with pytest.raises(LeaseLostError, match=INCARNATION):
        Fence(scene.store).check(INCARNATION, step=5)


def test_the_first_generation_is_fenced_off_too() -> None:
    scene = Scene()
    scene.hold(number=1)
    scene.hold("second", number=2)
    with pytest.raises(LeaseLostError):
        Fence(scene.store).check("000001-aa", step=5)


@pytest.mark.parametrize("incarnation", ["run7", "000000-aa"])
def test_what_has_no_number_of_a_generation_is_not_fenced_off(incarnation: str) -> None:
    scene = Scene()
    scene.hold(number=1)
    Fence(scene.store).check(incarnation, step=5)


def test_a_newer_generation_of_the_same_owner_refuses_what_it_left_out() -> None:
    scene = Scene()
    scene.hold(number=3)
    scene.hold(number=4)
    Lineage(scene.store).write(ResumeOrigin(3, INCARNATION, 10, "000002-xx"))
    Lineage(scene.store).write(ResumeOrigin(4, "000004-bb", 20, INCARNATION))
    fence = Fence(scene.store)
    fence.check(INCARNATION, step=20)
    with pytest.raises(LeaseLostError):
        fence.check(INCARNATION, step=21)


def test_a_damaged_newer_record_refuses_nothing() -> None:
    scene = Scene()
    scene.hold(number=3)
    scene.store.objects["launch/generations/000000004.json"] = b"{"
    Fence(scene.store).check(INCARNATION, step=5)


def test_a_synchronous_save_of_one_that_lost_the_lease_commits_and_deletes_nothing() -> None:
    store = FakeStore()
    scene = Scene(store)
    scene.hold(number=3)
    bench = Bench(store)
    checkpointer = bench.checkpointer(INCARNATION, keep_last=1)
    checkpointer.save(1, tensors={}, state={}, reason="due")
    scene.hold("second", number=4)
    before = {key for key in store.objects if key.endswith("manifest.json")}
    with pytest.raises(LeaseLostError):
        checkpointer.save(2, tensors={}, state={}, reason="due")
    assert {key for key in store.objects if key.endswith("manifest.json")} == before
