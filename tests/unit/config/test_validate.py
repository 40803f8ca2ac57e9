"""Plain values into dataclasses: conversions lose nothing, problems are complete."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.config.constraints import NonEmpty, Range
from elastictrain.config.validate import check_dataclass, check_value, suggest_choice, suggest_key
from elastictrain.errors import ConfigError, Problem
from tests.unit.examples import examples


def refusal(width: int) -> str:
    return f"{width} is refused"


@dataclass(frozen=True, slots=True)
class Inner:
    width: Annotated[int, Range(1)]
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.width == 13:
            raise ConfigError([Problem("width", "must not be 13"), Problem("inner.ratio", "is unlucky")])
        if self.width == 14:
            raise ValueError(refusal(14))


@dataclass(frozen=True, slots=True)
class Outer:
    name: Annotated[str, NonEmpty()]
    steps: Annotated[int, Range(1, 100)]
    mode: Literal["auto", "off"] = "auto"
    peak: Annotated[float, Range(0.0, exclusive=True)] | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    weights: Mapping[str, float] | None = None
    inner: Inner | None = None


def problems_of(values: dict[str, object]) -> dict[str, str]:
    _, problems = check_dataclass(Outer, values={"name": "x", "steps": 1, **values}, path="outer")
    return {problem.key: problem.message for problem in problems}


def test_good_values_are_converted_without_loss() -> None:
    values = {
        "name": "x",
        "steps": 1e1,
        "peak": 2,
        "sizes": [1, 2],
        "pair": [3, "b"],
        "weights": {"a": 1},
        "inner": {"width": 2},
    }
    outer, problems = check_dataclass(Outer, values=values, path="outer")
    assert problems == []
    assert outer == Outer("x", 10, "auto", 2.0, (1, 2), (3, "b"), {"a": 1.0}, Inner(2))
    assert type(outer.steps) is int
    assert type(outer.peak) is float


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", True, "must be a whole number >= 1 and <= 100, but is true"),
        ("steps", "1", 'must be a whole number >= 1 and <= 100, but is "1"'),
        ("steps", 1.5, "must be a whole number >= 1 and <= 100, but is 1.5"),
        ("steps", 0, "must be a whole number >= 1 and <= 100, but is 0"),
        ("steps", 101, "must be a whole number >= 1 and <= 100, but is 101"),
        ("steps", None, "must be a whole number >= 1 and <= 100, but is null"),
        ("steps", "???", "must be given: a whole number >= 1 and <= 100"),
        ("peak", 0, "must be a number > 0 or null, but is 0"),
        ("peak", "1e-3", 'must be a number > 0 or null, but is "1e-3"'),
        ("peak", float("nan"), "must be a number > 0 or null, but is NaN"),
        ("peak", float("inf"), "must be a number > 0 or null, but is Infinity"),
        ("name", " ", 'must be text that is not empty, but is " "'),
        ("name", 7, "must be text that is not empty, but is 7; text that looks like this needs quotes within quotes, '\"7\"'"),
        ("mode", "of", 'must be one of "auto", "off", but is "of"'),
        ("mode", False, 'must be one of "auto", "off", but is false; YAML reads a bare off as false, write "off" in quotes'),
        ("sizes", 3, "must be a list, each a whole number, but is 3"),
        ("pair", [1], "must be a list of 2: a whole number, text, but is [1]"),
        ("inner", 3, "must be a group of keys or null, but is 3"),
        ("nmae", "x", "is not a key; did you mean `outer.name`?"),
        ("zzz", "x", "is not a key; `outer` has name, steps, mode, peak, sizes, pair, weights, inner"),
    ],
)
def test_a_wrong_value_says_what_must_be_and_what_is(key: str, value: object, message: str) -> None:
    assert problems_of({key: value}) == {f"outer.{key}": message}


def test_problems_inside_a_value_carry_their_own_path() -> None:
    found = problems_of({"sizes": [1, "b"], "weights": {"a": "x"}, "inner": {"widht": 1, "ratio": "x"}})
    assert set(found) == {"outer.sizes[1]", "outer.weights.a", "outer.inner.width", "outer.inner.widht", "outer.inner.ratio"}


def test_what_a_class_refuses_itself_is_reported_under_its_path() -> None:
    _, problems = check_dataclass(Inner, values={"width": 13}, path="inner")
    assert [problem.key for problem in problems] == ["inner.width", "inner.ratio"]
    _, problems = check_dataclass(Inner, values={"width": 14}, path="inner")
    assert [problem.key for problem in problems] == ["inner"]
    assert problems[0].message.endswith(f"Inner: {refusal(14)}")


def test_a_mandatory_key_that_is_absent_is_missing() -> None:
    _, problems = check_dataclass(Outer, values={}, path="outer")
    assert [problem.key for problem in problems] == ["outer.name", "outer.steps"]


def test_a_union_takes_the_member_that_the_value_is() -> None:
    assert check_value(2, hint=float | int, path="k") == (2, [])
    assert type(check_value(2, hint=float | int, path="k")[0]) is int
    assert check_value("a", hint=int | str, path="k") == ("a", [])


def test_a_type_that_config_cannot_hold_is_said_so() -> None:
    _, problems = check_value("x", hint=set[int], path="k")
    assert "k" in {problem.key for problem in problems}


@given(st.integers(-5, 5), st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 5), st.booleans())
def test_a_range_holds_what_it_says(value: int, minimum: int | None, maximum: int | None, exclusive: bool) -> None:
    _, problems = check_value(value, hint=Annotated[int, Range(minimum, maximum, exclusive)], path="k")
    above = minimum is None or value > minimum or (value == minimum and not exclusive)
    assert (not problems) == (above and (maximum is None or value <= maximum))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from([*Outer.__dataclass_fields__, "other"]), plain))
def test_any_plain_values_give_a_result_or_problems_but_never_an_exception(values: dict[str, object]) -> None:
    outer, problems = check_dataclass(Outer, values=values, path="outer")
    assert (outer is None) == bool(problems)


VOCABULARY = ("run.dir", "checkpoint.dir", "run.seed", "train.steps", "train.seq_len", "optim.lr", "checkpoint.every_steps")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.stepss", "train.steps"),
        ("train.lr", ""),
        ("seed", "run.seed"),
        ("dir", ""),
        ("trian.steps", "train.steps"),
        ("Train.steps", "train.steps"),
        ("train.every_steps", "train.steps"),
        ("optim.seed_", ""),
        ("train.l", ""),
        ("nothing.like", ""),
    ],
)
def test_suggest_key(wrong: str, meant: str) -> None:
    assert suggest_key(wrong, vocabulary=VOCABULARY) == meant


def test_suggest_choice() -> None:
    assert suggest_choice("fspd", choices=["ddp", "fsdp"]).endswith(" fsdp?")
    assert suggest_choice("xyz", choices=["ddp", "fsdp"]) == ""
