import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.data.assignment import Portion, Share, passes
from elastictrain.data.ledger import Ledger, Row, check_exactly_once, effective, fold, read_ledger
from tests.unit.examples import examples

RUN = {"global_batch": 5, "num_samples": 12, "seed": 3, "shuffle": True}


class ListLog:
    def __init__(self) -> None:
        self.data = b""
        self.flushed = False
        self.closed = False

    def append(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        self.flushed = True

    def close(self) -> None:
        self.closed = True


def consume(incarnation: str, *, world: int, first_step: int, last_step: int) -> list[Row]:
    """The rows that a world writes for steps [first_step, last_step), counted from 0."""
    rows = []
    for rank in range(world):
        share = Share(global_batch=5, micro_batch=2, world_size=world, rank=rank)
        log = ListLog()
        ledger = Ledger(log)
        for step in range(first_step, last_step):
            planned = [
                one
                for one in passes(step, last_step=step + 1, share=share, num_samples=12, seed=3, shuffle=True)
                if one.step == step
            ]
            ledger.record(step + 1, consumed=[(one.portion, one.sample_ids) for one in planned])
        for line in log.data.splitlines():
            row = json.loads(line)
            positions = tuple((first, end) for first, end in row["positions"])
            rows.append(Row(incarnation, rank, row["step"], positions, tuple(row["samples"])))
    return rows


@settings(max_examples=examples(40))
@given(worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_any_history_of_worlds_consumes_exactly_once(worlds: list[int], data: st.DataObject) -> None:
    rows, step = [], 0
    for number, world in enumerate(worlds):
        # Each incarnation goes back to some checkpoint and then gets further than the one before.
        first = data.draw(st.integers(0, step))
        step += data.draw(st.integers(1, 3))
        rows += consume(f"{number:06d}-abc", world=world, first_step=first, last_step=step)
    assert check_exactly_once(rows, steps=step, **RUN) == ()
    assert [list(found) for found in fold(rows).values()] == [list(range(5 * s, 5 * s + 5)) for s in range(step)]


def test_the_newest_incarnation_supersedes() -> None:
    rows = [Row("000002-a", 0, 1, ((0, 1),), (9,)), Row("000001-z", 0, 1, ((0, 1),), (4,)), Row("000001-z", 1, 2, (), ())]
    assert effective(rows) == {1: [rows[0]], 2: [rows[2]]}
    assert fold(rows) == {1: {0: 9}, 2: {}}


def test_each_kind_of_mistake_is_found() -> None:
    rows = consume("000001-a", world=2, first_step=0, last_step=3)
    assert check_exactly_once(rows, steps=3, **RUN) == ()
    assert "misses" in check_exactly_once(rows[1:], steps=3, **RUN)[0]
    assert "repeats [0" in check_exactly_once([*rows, rows[0]], steps=3, **RUN)[0]
    assert "[99]" in check_exactly_once([*rows, Row("000001-a", 5, 1, ((99, 100),), ())], steps=3, **RUN)[0]
    wrong = Row(rows[0].incarnation, 0, rows[0].step, rows[0].positions, (0, *rows[0].samples[1:]))
    assert "rank 0" in check_exactly_once([wrong, *rows[1:]], steps=3, **RUN)[0]
    assert "step 3" in check_exactly_once(rows, steps=2, **RUN)[0]
    assert "step 4" in check_exactly_once(rows, steps=4, **RUN)[0]


def test_portions_that_do_not_count_are_not_written() -> None:
    log = ListLog()
    ledger = Ledger(log)
    ledger.record(7, consumed=[(Portion(4, 6, True), (10, 11)), (Portion(0, 2, False), (1, 2))])
    assert not log.flushed
    ledger.log.flush()
    assert log.flushed
    assert not log.closed
    ledger.log.close()
    assert json.loads(log.data) == {"step": 7, "positions": [[4, 6]], "samples": [10, 11]}
    assert log.closed


def test_reading_logs_in_whole_or_in_segments(memory_store: Any) -> None:
    line = b'{"step": 1, "positions": [[0, 2]], "samples": [5, 6]}\n'
    memory_store.write("ledger/000001-a-r00000.jsonl", line + line[:20])
    memory_store.write("ledger/000002-b-r00003.part-00001.jsonl", line)
    memory_store.write("ledger/notes.txt", b"something else")
    assert list(read_ledger(memory_store)) == [
        Row("000001-a", 0, 1, ((0, 2),), (5, 6)),
        Row("000002-b", 3, 1, ((0, 2),), (5, 6)),
    ]
