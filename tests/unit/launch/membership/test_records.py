import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import encode_record
from elastictrain.launch.membership.records import (
    End,
    EndKind,
    Generation,
    GenerationFailure,
    GenerationMember,
    GenerationOutcome,
    HostRecord,
    HostState,
    decode,
)

ENTRY = HostRecord("a-1", "a", "10.0.0.1", 4000, 5000, 8, -1, HostState.READY, "", 3, 2)
END = End(7, "a-1", EndKind.FAILED, 71, "reduce", 12, 10, "a peer is gone", "b-1", ("b-1", "c-1"))
FAILURE = GenerationFailure(6, ("b-1",), 70, "forward", 3, 2, "boom")
MEMBER = GenerationMember("a-1", "a", "10.0.0.1", 4000, 8)
GENERATION = Generation(7, GenerationOutcome.RUN, (MEMBER,), 5000, "a-1", (FAILURE,), ("c-1",), 2.0, 0, "b left", slow=END)
RECORDS = (ENTRY, END, GENERATION)

text = st.text()
number = st.integers(-(2**63), 2**63 - 1)
members = st.builds(GenerationMember, text, text, text, number, number)
failures = st.builds(GenerationFailure, number, st.lists(text).map(tuple), number, text, number, number, text)
records = st.one_of(
    st.builds(HostRecord, text, text, text, number, number, number, number, st.sampled_from(HostState), text, number, number),
    st.builds(End, number, text, st.sampled_from(EndKind), number, text, number, number, text, text, st.lists(text).map(tuple)),
    st.builds(
        Generation,
        number,
        st.sampled_from(GenerationOutcome),
        st.lists(members, max_size=3).map(tuple),
        number,
        text,
        st.lists(failures, max_size=3).map(tuple),
        st.lists(text, max_size=3).map(tuple),
        st.floats(allow_nan=False, allow_infinity=False),
        number,
        text,
    ),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(records)
def test_what_is_written_is_read(record: HostRecord | End | Generation) -> None:
    assert decode(type(record), encode_record(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_one_object_that_other_programs_can_read(record: HostRecord | End | Generation) -> None:
    assert isinstance(json.loads(encode_record(record)), dict)
    assert b"\n" not in encode_record(record)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_no_beginning_of_a_record_is_one(record: HostRecord | End | Generation) -> None:
    data = encode_record(record)
    assert [decode(type(record), data[:length]) for length in range(len(data))] == [None] * len(data)


@settings(max_examples=40)
@given(st.binary() | values.map(lambda value: json.dumps(value).encode()))
def test_garbage_reads_as_nothing(data: bytes) -> None:
    for cls in (HostRecord, End, Generation):
        assert decode(cls, data) is None


@settings(max_examples=40)
@given(st.sampled_from(RECORDS), st.data())
def test_a_field_of_another_kind_is_read_as_nothing_or_as_what_it_says(
    record: HostRecord | End | Generation, data: st.DataObject
) -> None:
    """Never raises; what it returns can be written again, and is then the same."""
    fields = json.loads(encode_record(record))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(values)
    found = decode(type(record), json.dumps(fields).encode())
    assert found is None or decode(type(record), encode_record(found)) == found


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (ENTRY, {"beat": True}),
        (ENTRY, {"beat": 1.0}),
        (ENTRY, {"beat": "1"}),
        (ENTRY, {"state": "asleep"}),
        (ENTRY, {"state": 3}),
        (ENTRY, {"host": None}),
        (ENTRY, {"more": 1}),
        (END, {"kind": "ready"}),
        (END, {"blames": "b-1"}),
        (END, {"blames": [1]}),
        (GENERATION, {"members": {}}),
        (GENERATION, {"members": ["a-1"]}),
        (GENERATION, {"members": [{"host": "a-1"}]}),
        (GENERATION, {"failures": [None]}),
        (GENERATION, {"pause_s": False}),
        (GENERATION, {"pause_s": float("nan")}),
        (GENERATION, {"pause_s": float("inf")}),
        (GENERATION, {"pause_s": 10**400}),
        (GENERATION, {"pause_s": "1"}),
        (GENERATION, {"number": 7.0}),
    ],
    ids=str,
)
def test_what_no_release_writes_is_refused(record: HostRecord | End | Generation, changes: dict[str, object]) -> None:
    fields = json.loads(encode_record(record))
    assert decode(type(record), json.dumps({**fields, **changes}).encode()) is None


@pytest.mark.parametrize(
    ("record", "name"), [(GENERATION, "members"), (GENERATION, "failures"), (replace(ENTRY, end=END), "end")], ids=str
)
def test_a_key_of_a_later_release_is_refused_wherever_it_stands(record: HostRecord | Generation, name: str) -> None:
    fields = json.loads(encode_record(record))
    assert decode(type(record), json.dumps(fields)) == record
    inner = fields[name][0] if isinstance(fields[name], list) else fields[name]
    inner["more"] = 1
    assert decode(type(record), json.dumps(fields)) is None


@pytest.mark.parametrize("name", ["host", "beat", "ended"])
def test_a_record_of_another_release_that_lacks_a_field_is_none(name: str) -> None:
    fields = json.loads(encode_record(ENTRY))
    del fields[name]
    assert decode(HostRecord, json.dumps(fields).encode()) is None


def test_a_pause_may_be_written_without_a_point() -> None:
    fields = json.loads(encode_record(GENERATION))
    found = decode(Generation, json.dumps({**fields, "pause_s": 3}).encode())
    assert found == replace(GENERATION, pause_s=3.0)


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff\xfe", b""], ids=lambda data: repr(data[:5])
)
def test_what_breaks_a_parser_is_nothing(data: bytes) -> None:
    assert decode(HostRecord, data) is None
