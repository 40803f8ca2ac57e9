"""Which checkpoint a start takes, from what is known of all of them."""

from dataclasses import replace

import pytest

from elastictrain.checkpoint.commands.rows import Row, State, merge, resume_choice

ROW = Row(
    name="x",
    step=0,
    tier="storage",
    state=State.VALID,
    reason="",
    created=0.0,
    modified=0.0,
    size_bytes=0,
    world_size=1,
    num_files=1,
)


def rows(*states: State) -> list[Row]:
    return [replace(ROW, name=str(number), step=10 - number, state=state) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ((), None),
        ((State.VALID, State.VALID), "0"),
        ((State.UNCOMMITTED, State.QUARANTINED, State.DAMAGED, State.VALID), "3"),
        ((State.UNCOMMITTED, State.DAMAGED), None),
        ((State.UNKNOWN, State.VALID), None),
        ((State.VALID, State.UNKNOWN), "0"),
    ],
)
def test_what_a_start_takes(states: tuple[State, ...], chosen: str | None) -> None:
    found = resume_choice(rows(*states))
    assert (found.name if found else None) == chosen


def test_newest_first_and_snapshots_before_storage() -> None:
    stored = [replace(ROW, step=7, name="b"), replace(ROW, step=7, name="a"), replace(ROW, step=5, name="c")]
    snapshots = [replace(ROW, step=9, tier="memory", name="m9"), replace(ROW, step=7, tier="memory", name="m7")]
    assert [row.name for row in merge(stored, snapshots)] == ["m9", "m7", "b", "a", "c"]
