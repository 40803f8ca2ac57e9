"""Every document is a value of known size or a named refusal."""

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.bounded_json import (
    DOCUMENT,
    RECORD,
    JsonLimits,
    MalformedJsonError,
    as_record,
    encode_record,
    parse_json,
    parse_record,
)
from tests.unit.examples import examples

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200))
@given(VALUES)
def test_what_a_writer_makes_is_read(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode("utf-8", errors="surrogatepass")) == value


@settings(max_examples=examples(200))
@given(st.binary(max_size=60))
def test_anything_else_is_refused_with_one_error(data: bytes) -> None:
    with suppress(MalformedJsonError):
        parse_json(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 200_000,
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b"[" * 33 + b"]" * 33,
        b"1" * 5_000,
        b"-" + b"1" * 5_000,
        b"1e999",
        b"-1e999",
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":1}}',
        b'"\xff"',
        '"text"'.encode("utf-16"),
        b'\xef\xbb\xbf{"a":1}',
        b'"\\ud800"',
        b'{"\\udfff":1}',
        b"[" + b"0," * (1 << 18) + b"0]",
        b'"' + b"x" * (1 << 20) + b'"',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_hostile_documents(data: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(MalformedJsonError):
        parse_json(data)
    assert time.monotonic() - began < 5.0


def test_bounds_hold_to_the_byte() -> None:
    limits = JsonLimits(max_bytes=5, max_values=3, max_depth=2)
    assert parse_json(b"[[1]]", limits=limits) == [[1]]
    assert parse_json(b"[1,2]", limits=limits) == [1, 2]
    for data in (b"[[1] ]", b"[[[]]", b"[[],0]", b"{}{}:"):
        with pytest.raises(MalformedJsonError):
            parse_json(data, limits=limits)
    with pytest.raises(MalformedJsonError, match="2 nested"):
        parse_json(b"[[[]]]", limits=JsonLimits(max_bytes=6, max_values=3, max_depth=2))


def test_many_keys_of_which_one_is_there_twice() -> None:
    names = [f'"k{number}":0' for number in range(200_000)]
    began = time.monotonic()
    with pytest.raises(MalformedJsonError, match="'k199999'"):
        parse_json("{" + ",".join([*names, '"k199999":1']) + "}", limits=DOCUMENT)
    assert time.monotonic() - began < 20.0


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"', limits=RECORD) == "\U0001f600"


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 10**19, 10**20 - 1])
def test_integers_of_64_bits_are_read_beside_texts_that_look_like_larger_ones(number: int) -> None:
    assert parse_json(f'[{number},"{"7" * 32}"]') == [number, "7" * 32]
    for longer in (10**20, -(10**19)):
        with pytest.raises(MalformedJsonError):
            parse_json(f'[{number},{longer},"{"7" * 32}"]')


class Kind(StrEnum):
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Inner:
    name: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    number: Annotated[int, msgspec.Meta(ge=0)]
    kind: Kind
    inner: tuple[Inner, ...]
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.number > self.limit:
            raise ValueError("number must not be above limit")


def test_a_record_comes_back_as_it_was() -> None:
    record = Outer(3, Kind.SLOW, (Inner("a", (1.5, 2.0)), Inner("b")), limit=4)
    assert parse_record(encode_record(record), Outer) == record
    assert parse_record(b'{"number":0,"kind":"slow","inner":[],"later":1}', Outer) == Outer(0, Kind.SLOW, ())


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"number": True}, "$.number"),
        ({"number": -1}, "$.number"),
        ({"number": 1.0}, "$.number"),
        ({"number": "1"}, "$.number"),
        ({"kind": "fast"}, "$.kind"),
        ({"inner": [{"name": "a"}, {"values": []}]}, "$.inner[1]"),
        ({"inner": {}}, "$.inner"),
        ({"limit": 2}, "limit"),
    ],
)
def test_a_field_of_another_type_is_refused_by_its_place(change: dict[str, object], place: str) -> None:
    good = {"number": 3, "kind": "slow", "inner": []}
    assert parse_record(json.dumps(good), Outer)
    with pytest.raises(MalformedJsonError) as refused:
        parse_record(json.dumps(good | change), Outer)
    assert place in str(refused.value)


def test_a_record_is_bounded_like_any_document() -> None:
    with pytest.raises(MalformedJsonError):
        parse_record('{"number":1,"number":1,"kind":"slow","inner":[]}', Outer)
    with pytest.raises(ValueError, match="JSON"):
        encode_record(Inner("a", (float("nan"),)))


class Version(str):
    """A text that knows how to compare itself, as torch's version does."""


def test_subclasses_of_texts_and_numbers_are_encoded_as_what_they_are() -> None:
    assert encode_record({"torch": Version("2.9"), "loss": np.float64(0.5)}) == b'{"torch":"2.9","loss":0.5}'
    with pytest.raises(TypeError):
        encode_record({"one": object()})


def test_threads_that_meet_a_record_for_the_first_time_together() -> None:
    count = Annotated[int, msgspec.Meta(ge=0)]
    one = {f"f{index}": index for index in range(10)} | {"sizes": [1, 2]}
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            inner = make_dataclass("Inner", [*((f"f{index}", count) for index in range(10)), ("sizes", tuple[count, ...])])
            outer = make_dataclass("Outer", [("first", inner), ("many", list[inner]), ("by_name", dict[str, inner])])  # type: ignore[valid-type]
            together, found = threading.Barrier(8), []

            def convert(kind: type, together: threading.Barrier, found: list[object]) -> None:
                together.wait()
                found.append(as_record({"first": one, "many": [one], "by_name": {"x": one}}, kind))

            threads = [threading.Thread(target=convert, args=(outer, together, found)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(found) == 8
            assert all(record == found[0] for record in found)
    finally:
        sys.setswitchinterval(switch_s)
