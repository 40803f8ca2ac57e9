import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.bounded_json import encode_record, parse_record
from elastictrain.preflight.verdict import (
    Reporter,
    Scope,
    Status,
    Verdict,
    describe,
    failures,
    render,
    shown,
    summary,
    worst_first,
)
from tests.unit.preflight.made import link, verdict

VANISH = "frames vanish above 1500"
FOUND = [
    verdict(check="disk", subject="a", measured=77.0, expected=1.0, unit="GiB"),
    verdict("fail", scope="link", subject=link("a", "b"), measured=VANISH, expected=9000, unit="bytes"),
    verdict("warn", check="clock", subject="b", measured=1.25, unit="s"),
    verdict("skip", check="gpus", subject="a"),
]

texts = st.text(max_size=20)
figures = st.none() | texts | st.floats(allow_nan=False, allow_infinity=False)
verdicts = st.builds(
    Verdict,
    check=texts,
    scope=st.sampled_from(Scope),
    subject=texts,
    status=st.sampled_from(Status),
    measured=figures,
    expected=figures,
    unit=texts,
    seconds=st.floats(0, 1e6),
    remedy=st.text(min_size=1, max_size=20),
    may_pass=st.booleans(),
)


def test_the_worst_is_on_top_with_its_remedy_below() -> None:
    lines = render(FOUND, colour=False, width=100).splitlines()
    assert lines[0].split() == ["check", "subject", "measured", "expected", "seconds"]
    assert lines[1].startswith("fail  mtu")
    assert f"{VANISH} bytes" in lines[1]
    assert lines[2].strip() == f"-> {FOUND[1].remedy}"
    assert lines[3].split() == ["warn", "clock", "b", "1.25", "s", "0.00"]
    assert lines[-1] == summary(FOUND)
    assert "\033" not in "".join(lines)


def test_what_passed_may_be_counted_only() -> None:
    text = render(FOUND, colour=False, width=100, everything=False)
    assert "disk" not in text
    assert "gpus" not in text
    assert text.endswith(summary(FOUND))
    assert render(FOUND[:1], colour=False, width=100, everything=False) == "1 passed"


def test_only_the_status_is_coloured() -> None:
    text = render(FOUND, colour=True, width=100)
    assert "\033[1;31mfail\033[0m  mtu" in text
    assert "\033[33mwarn\033[0m  clock" in text


def test_a_long_figure_is_wrapped_and_not_cut() -> None:
    words = " ".join(f"word{number}" for number in range(40))
    text = render([verdict("fail", measured=words)], colour=False, width=100)
    assert all(f"word{number}" in text for number in range(40))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_the_terminal(width: int) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    found = [Reporter("mtu").failed(words, expected=words, remedy=words), Reporter("clock", "h" * 30).warned(1.0, remedy=words)]
    lines = render(found, colour=False, width=width).splitlines()
    assert max(map(len, lines)) <= width


@given(st.lists(verdicts, max_size=5))
def test_json_comes_back_as_it_went(found: list[Verdict]) -> None:
    assert parse_record(encode_record(found), list[Verdict]) == found
    assert render(found, colour=True, width=80)


@pytest.mark.parametrize(
    "text", ["", "7", "[7]", "[{}]", '[{"scope": "host", "status": "fine"}]', '[{"check": 1}]', "[" * 5000, "null"]
)
def test_what_is_no_list_of_verdicts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_record(text, list[Verdict])


def test_all_are_counted_and_nothing_checked_is_said() -> None:
    assert summary(FOUND) == "1 failed, 1 warning, 1 passed, 1 skipped"
    assert summary([verdict("warn")] * 2).startswith("2")
    assert summary([])


@pytest.mark.parametrize("status", [Status.SKIP, Status.WARN, Status.FAIL])
def test_whatever_did_not_pass_needs_a_remedy(status: Status) -> None:
    with pytest.raises(ValueError, match="'mtu'"):
        Verdict(check="mtu", scope=Scope.HOST, subject="a", status=status)


def test_the_worst_comes_first_and_the_rest_stays_in_order() -> None:
    found = [verdict(status, subject=str(number)) for number, status in enumerate(["pass", "fail", "skip", "warn", "fail"])]
    assert [one.subject for one in worst_first(found)] == ["1", "4", "3", "2", "0"]
    assert [one.subject for one in failures(found)] == ["1", "4"]


def test_a_sentence_says_who_what_and_what_to_do() -> None:
    one = verdict("fail", check="bandwidth", subject="b", measured=0.09212, expected=0.5, unit="Gb/s")
    assert describe(one) == "b: bandwidth is 0.09212 Gb/s (should be 0.5 Gb/s); mend bandwidth of b"
    assert describe(verdict("fail")) == "a: mtu; mend mtu of a"
    assert [shown(one) for one in (None, "no", 20000.0, 0.5, 1e20, 1 / 3, -2.0)] == [
        "",
        "no",
        "20000",
        "0.5",
        "100000000000000000000",
        "0.3333",
        "-2",
    ]
