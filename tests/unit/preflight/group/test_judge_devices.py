from collections.abc import Callable
from dataclasses import replace

import pytest

from elastictrain.preflight.group.corruption import DeviceFindings
from elastictrain.preflight.group.judge import judge_corruption, judge_load
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.verdict import Scope, Status
from elastictrain.surroundings import ToolOutput
from tests.unit.preflight.group.ranks import H200, members
from tests.unit.preflight.made import gpu, rank

FOUR = members("h1", "h1", "h2", "h2", device=H200)
GOOD = DeviceFindings(700.0, copies_gbs=(50.0, 52.0))
BAD = replace(GOOD, wrong=("1 of 9 words of a memory pattern",))


def test_no_wrong_bits() -> None:
    (found,) = judge_corruption([dict.fromkeys(range(4), GOOD)], FOUR)
    assert (found.check, found.status) == ("sdc", Status.PASS)


def test_each_gpu_with_wrong_bits_is_named() -> None:
    other = replace(GOOD, wrong=("0.1 of products in float32",))
    found = judge_corruption([{0: GOOD, 1: BAD, 2: GOOD, 3: GOOD}, {0: GOOD, 1: GOOD, 2: other, 3: GOOD}], FOUR)
    assert [(one.subject, one.status, one.scope) for one in found] == [
        (gpu(1), Status.FAIL, Scope.HOST),
        ("GPU 0 on h2", Status.FAIL, Scope.HOST),
    ]


def test_a_single_gpu_can_be_judged() -> None:
    (found,) = judge_corruption([{0: BAD}], FOUR[:1])
    assert (found.subject, found.status) == (gpu(0), Status.FAIL)
    (cpu,) = judge_corruption([{0: BAD}], members("h1"))
    assert cpu.subject == rank(0, "h1")


def test_what_is_wrong_alike_everywhere_is_software() -> None:
    (found,) = judge_corruption([dict.fromkeys(range(4), BAD)], FOUR)
    assert (found.subject, found.status, found.scope) == ("all", Status.WARN, Scope.GROUP)


@pytest.mark.parametrize("way", [0, 1])
def test_slow_copies_name_the_gpu(way: int) -> None:
    slow = replace(GOOD, copies_gbs=(50.0, 9.0)[:: 1 if way else -1])
    (found,) = judge_load({0: GOOD, 1: GOOD, 2: GOOD, 3: slow}, FOUR)
    assert (found.check, found.subject, found.status, found.measured) == ("pcie", "GPU 1 on h2", Status.WARN, 9.0)
    assert judge_load(dict.fromkeys(range(4), GOOD), FOUR) == []


def test_all_slow_copies_are_measured_by_the_link(answered: Callable[..., ToolOutput], recorded: Callable[[str], str]) -> None:
    idle = parse_nvidia(answered("nvidia_smi_570_h200.xml")).gpus
    busy = tuple(replace(one, generation=5) for one in idle)
    slow = replace(GOOD, copies_gbs=(11.0, 11.0))
    found = judge_load({0: replace(slow, gpus=busy), 1: slow}, FOUR[:2])
    assert [(one.subject, one.expected) for one in found] == [(gpu(0), 24.0)] * 2 + [(gpu(1), 24.0)] * 2
    assert judge_load({0: replace(GOOD, gpus=busy), 1: GOOD}, FOUR[:2]) == []
    # Both links have the first generation only, and one GPU is hot.
    hot = (replace(idle[0], slowed=("thermal (hardware)",)), idle[1])
    found = judge_load({0: replace(GOOD, gpus=hot), 1: GOOD}, FOUR[:2])
    assert [(one.check, one.subject, one.measured) for one in found if one.check == "pcie"] == [
        ("pcie", gpu(0), 1),
        ("pcie", gpu(1), 1),
    ]
    assert [one.subject for one in found if one.check == "throttle"] == [gpu(0)]
    assert {one.status for one in found} == {Status.WARN}
