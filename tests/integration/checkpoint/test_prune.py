"""What retention counts where generations overlap; which checkpoints it deletes otherwise is in test_retention.py."""

from collections.abc import Callable, Iterable

import pytest
import torch

from elastictrain.checkpoint.lineage import Lineage, ResumeOrigin
from tests.unit.checkpoint.fakes import Bench

FIRST, SECOND, THIRD = "000001-aa", "000002-bb", "000003-cc"


def save(bench: Bench, step: int, incarnation: str, *, keep_last: int = 9, keep_every: int = 0) -> None:
    checkpointer = bench.checkpointer(incarnation, keep_last=keep_last, keep_every=keep_every)
    checkpointer.save(step, tensors={"w": torch.full((4,), float(step))}, state={"step": step}, reason="step")


def overlapping(*off_lineage: int) -> Bench:
    """The second generation went on from step 20 of the first, which then thawed, and committed `off_lineage`."""
    bench = Bench()
    Lineage(bench.store).write(ResumeOrigin(1, FIRST, 0, ""))
    for step in (10, 20):
        save(bench, step, FIRST)
    Lineage(bench.store).write(ResumeOrigin(2, SECOND, 20, FIRST))
    save(bench, 22, SECOND)
    for step in off_lineage:
        save(bench, step, FIRST)
    return bench


def steps(bench: Bench) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in bench.folders())


def lineage_reads(bench: Bench, step: int, *, keep_last: int) -> int:
    """How often a save asks for it."""
    asked: list[str] = []
    bench.store.before = lambda operation, key: asked.append(key) if key.startswith("lineage") else None
    save(bench, step, SECOND, keep_last=keep_last)
    return len(asked)


def without_a_file(objects: dict[str, bytes]) -> None:
    del objects[next(key for key in objects if "step-000000020" in key and key.endswith(".safetensors"))]


def garbled(objects: dict[str, bytes]) -> None:
    objects["checkpoints/step-000000020/manifest.json"] = b"{"


def of_another_step(objects: dict[str, bytes]) -> None:
    for key in [key for key in objects if "step-000000020" in key]:
        del objects[key]
    for key in [key for key in objects if "step-000000010" in key]:
        objects[key.replace("step-000000010", "step-000000020")] = objects[key]


@pytest.mark.parametrize("damage", [without_a_file, garbled, of_another_step])
def test_what_is_not_whole_takes_no_place_of_what_is(damage: Callable[[dict[str, bytes]], None]) -> None:
    bench = Bench()
    for step in (10, 20):
        save(bench, step, FIRST)
    damage(bench.store.objects)
    save(bench, 30, FIRST, keep_last=2)
    assert steps(bench) == [10, 20, 30]


def test_what_is_off_the_line_is_not_kept_in_the_place_of_what_is_on_it() -> None:
    bench = overlapping(30)
    save(bench, 32, SECOND, keep_last=3)
    # Without the one off the line these three are the newest; it stays for a person meanwhile.
    assert steps(bench) == [20, 22, 30, 32]
    save(bench, 34, SECOND, keep_last=2)
    assert steps(bench) == [32, 34]


def test_a_multiple_off_the_line_is_none_that_is_kept() -> None:
    bench = overlapping(30)
    save(bench, 32, SECOND, keep_last=1, keep_every=10)
    assert steps(bench) == [10, 20, 30, 32]
    for step in (10, 20):
        for key in [key for key in bench.store.objects if f"step-{step:09d}" in key]:
            bench.store.delete(key)
    save(bench, 34, SECOND, keep_last=1, keep_every=10)
    assert steps(bench) == [34]


def test_a_generation_that_was_given_up_deletes_nothing_of_the_others() -> None:
    bench = overlapping()
    # The second generation writes at this moment.
    bench.store.objects[f"checkpoints/step-000000024/{SECOND}-r00000-000.safetensors"] = b"x"
    save(bench, 30, FIRST, keep_last=1)
    assert steps(bench) == [10, 20, 22, 24, 30]


def test_the_lineage_is_read_only_where_something_would_go() -> None:
    bench = overlapping()
    assert lineage_reads(bench, 24, keep_last=9) == 0
    assert 1 <= lineage_reads(bench, 26, keep_last=2) <= 3


def test_each_manifest_is_read_once() -> None:
    bench = Bench()
    save(bench, 10, FIRST)
    read: list[str] = []
    bench.store.before = lambda operation, key: read.append(key) if operation == "read" else None
    checkpointer = bench.checkpointer(FIRST, keep_last=9)
    for step in (20, 30):
        checkpointer.save(step, tensors={"w": torch.zeros(4)}, state={}, reason="step")
    # Its own ones after they were written, so not again to prune.
    assert [key.split("/")[1] for key in read if key.endswith("manifest.json")] == [f"step-0000000{n}" for n in (20, 10, 30)]


def test_a_run_without_a_launcher_has_no_line() -> None:
    bench = Bench()
    names: Iterable[str] = (FIRST, SECOND, THIRD)
    for step, incarnation in zip((10, 20, 30), names, strict=True):
        save(bench, step, incarnation, keep_last=2)
    assert steps(bench) == [20, 30]
