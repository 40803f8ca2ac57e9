from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.launch.cluster.slurm import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("gpu[001-003,7],login1", ["gpu001", "gpu002", "gpu003", "gpu7", "login1"]),
        ("gnode[10,20,25,37]", ["gnode10", "gnode20", "gnode25", "gnode37"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("nid[00001,00011-00012]", ["nid00001", "nid00011", "nid00012"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1-2].cluster,x-y.z", ["n1.cluster", "n2.cluster", "x-y.z"]),
        ("[1-2]", ["1", "2"]),
        ("tux2,tux1,tux2", ["tux2", "tux1", "tux2"]),
        ("n[5-5]", ["n5"]),
    ],
)
def test_hosts_as_scontrol_shows_them(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "n[",
            "n]",
            "n[1",
            "n[1-]",
            "n[-1]",
            "n[]",
            "n[1,]",
            "n[a-b]",
            "n[3-1]",
            "n[[1]]",
            "n[1]]",
        ],
        *["a b", "n[1 - 2]", "n[1-2", "n[0-99999999]", "n[0-999]m[0-999]", "n[²]", "\n", "n[1-2],m[0-65535]"],
    ],
)
def test_garbled_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("4(x2),3", [4, 4, 3]), ("2(x3),1", [2, 2, 2, 1]), ("1(x1)", [1]), ("8,4", [8, 4])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4(x2", "4x2", "-1", "4(x2),", "1(x99999999)", " 1"])
def test_garbled_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_counts(text)


names = st.text("abcxyz.-_", min_size=1, max_size=6)
ranges = st.tuples(st.integers(0, 200), st.integers(0, 5), st.integers(1, 5))


def _write(group: list[tuple[int, int, int]]) -> str:
    return ",".join(f"{low:0{width}d}" if more == 0 else f"{low:0{width}d}-{low + more}" for low, more, width in group)


def _numbers(group: list[tuple[int, int, int]]) -> list[str]:
    # The width is that of the first number as it is written.
    return [f"{number:0{max(width, len(str(low)))}d}" for low, more, width in group for number in range(low, low + more + 1)]


expressions = st.lists(st.tuples(names, st.lists(ranges, min_size=1, max_size=3)), max_size=2).flatmap(
    lambda parts: st.tuples(st.just(parts), names)
)


@given(st.lists(expressions, min_size=1, max_size=4))
def test_every_list_that_slurm_writes_is_read_back(
    written: list[tuple[list[tuple[str, list[tuple[int, int, int]]]], str]],
) -> None:
    text = ",".join("".join(f"{name}[{_write(group)}]" for name, group in parts) + last for parts, last in written)
    expected = [
        "".join(choice) + last
        for parts, last in written
        for choice in product(*([name + number for number in _numbers(group)] for name, group in parts))
    ]
    assert list(expand_hosts(text)) == expected


@given(st.text("gn[]-,()x0123456789 é", max_size=24))
def test_nothing_but_a_value_error(text: str) -> None:
    for expand in (expand_hosts, expand_counts):
        with suppress(ValueError):
            assert len(expand(text)) >= 1


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 9)), min_size=1))
def test_counts_are_read_back(pairs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{number}(x{times})" if times > 1 else f"{number}" for number, times in pairs)
    assert list(expand_counts(text)) == [number for number, times in pairs for _ in range(times)]
