import json
from dataclasses import asdict, replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import MalformedJsonError, as_record
from elastictrain.checkpoint.memory.slot import SlotState, SnapshotFacts, mark, read_header, write_body
from elastictrain.errors import CheckpointError
from tests.unit.checkpoint.memory.madeslots import facts_of
from tests.unit.examples import examples

PAGE = 16384
OLD = facts_of(7, reason="interval")
NEW = facts_of(123456789, incarnation="000002-bb")


def page_with(facts: object) -> bytearray:
    page = bytearray(PAGE)
    write_body(memoryview(page), facts)  # type: ignore[arg-type]
    mark(memoryview(page), SlotState.COMPLETE)
    return page


def test_what_was_written_is_read() -> None:
    assert read_header(page_with(OLD)) == OLD
    assert OLD.reason
    assert not NEW.reason


def test_empty_and_short_pages_hold_nothing() -> None:
    for length in (0, 1, 8, 35, 36, PAGE):
        assert read_header(bytes(length)) is None


def test_a_writer_killed_at_any_byte_never_leaves_a_snapshot_that_is_none() -> None:
    """Its stores in the order in which it does them, broken off after each byte; the state is one word, and never half."""
    before = page_with(OLD)
    writing = bytearray(before)
    mark(memoryview(writing), SlotState.WRITING)
    assert read_header(writing) is None
    after = bytearray(writing)
    write_body(memoryview(after), NEW)
    changed = [place for place in range(PAGE) if after[place] != writing[place]]
    # The body first, then its length and digest.
    for place in sorted(changed, key=lambda place: (place < 36, place)):
        writing[place] = after[place]
        assert read_header(writing) is None
    assert writing == after
    mark(memoryview(writing), SlotState.COMPLETE)
    assert read_header(writing) == NEW


def test_a_page_that_is_half_of_another_is_one_of_them_or_nothing() -> None:
    """However a crash mixes them: also if the state says complete."""
    old, new = page_with(OLD), page_with(NEW)
    found = [read_header(new[:cut] + old[cut:]) for cut in range(16, PAGE)]
    assert all(one in (None, OLD, NEW) for one in found)
    assert found[0] == OLD
    assert found[1] is None
    assert found[-1] == NEW


def test_every_flipped_bit_is_seen() -> None:
    page = page_with(OLD)
    length = 36 + len(json.dumps(asdict(OLD), separators=(",", ":")).encode())
    for place in range(length):
        for bit in range(8):
            page[place] ^= 1 << bit
            assert read_header(page) is None, (place, bit)
            page[place] ^= 1 << bit
    assert read_header(page) == OLD


@settings(max_examples=examples(500))
@given(st.binary(max_size=300))
def test_garbage_is_no_snapshot(data: bytes) -> None:
    assert read_header(data) is None


@settings(max_examples=examples(200))
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=10,
    )
)
def test_a_body_with_its_digest_that_is_no_snapshot(value: object) -> None:
    body = json.dumps(value).encode()
    page = page_with(OLD)
    page[36 : 36 + len(body)] = body
    page[16:20] = len(body).to_bytes(4, "little")
    page[20:36] = xxhash.xxh3_128_digest(body)
    assert read_header(page) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 2),
        ("version", True),
        ("step", -1),
        ("step", 1.0),
        ("rank", 1),
        ("run", 7),
        ("state", []),
        ("created", "now"),
    ],
)
def test_facts_that_cannot_be(name: str, value: object) -> None:
    document = asdict(OLD) | {name: value}
    with pytest.raises(MalformedJsonError, match=name):
        as_record(document, SnapshotFacts)


def test_a_state_too_large_for_the_header_is_refused() -> None:
    with pytest.raises(CheckpointError, match="16384"):
        write_body(memoryview(bytearray(PAGE)), replace(OLD, state={"long": "x" * PAGE}))
