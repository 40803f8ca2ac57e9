import pytest

from elastictrain.launch.membership.messages import give_up, listed, too_few
from elastictrain.launch.membership.records import GenerationFailure, HostState
from tests.unit.launch.membership.made import record


def failure(
    number: int, *, step: int = 0, phase: str = "", hosts: tuple[str, ...] = (), committed: int = 400
) -> GenerationFailure:
    return GenerationFailure(number, hosts, 70, phase, step, committed, f"reason {number}")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        ("abcdefghij", "a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_names_are_listed(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_too_few_hosts_are_told_with_those_that_are_there() -> None:
    assert too_few([], [], min_hosts=1) == "1 host (`launch.min_hosts`), of which 0 are there (none is ready)"
    text = too_few([record("a")], [record("b", HostState.BUSY)], min_hosts=2)
    assert text == "2 hosts (`launch.min_hosts`), of which 1 is there (ready: a; b is busy)"


def test_the_same_step_is_named_with_what_can_be_done() -> None:
    text = give_up([failure(number, step=412, phase="backward") for number in (3, 4, 5)])
    assert "failed 3 times in a row without a newly committed step:" in text
    assert "generation 4: reason 4 (step 412, backward, exit code 70, committed: step 400)" in text
    assert "step 412 failed 3 times: a poisoned batch or checkpoint" in text
    assert "that of step 400 is whole" in text
    assert "data.ledger=true" in text


def test_without_a_checkpoint_none_is_offered() -> None:
    text = give_up([failure(number, step=2, committed=0) for number in (1, 2, 3)])
    assert "step 2 failed 3 times" in text
    assert "verify" not in text


def test_the_same_phase_before_the_first_step_is_named() -> None:
    text = give_up([failure(number, phase="restore") for number in (1, 2, 3)])
    assert "Each time it was before the first step, in the same phase (restore)" in text
    assert "generation 1: reason 1 (before the first step, restore, exit code 70, committed: step 400)" in text


def test_the_same_host_is_named() -> None:
    text = give_up([failure(1, step=3, hosts=("b", "c")), failure(2, step=5, hosts=("c",))])
    assert text.endswith("Each time host c was to blame: replace it, or start without it.")


def test_failures_with_nothing_in_common_are_only_told() -> None:
    text = give_up([failure(1, step=3, phase="data"), failure(2, step=5, phase="data"), failure(3, phase="restore")])
    assert text.count("\n") == 3
    assert give_up([failure(1, step=3)]).startswith("failed once without a newly committed step:\n  generation 1")
