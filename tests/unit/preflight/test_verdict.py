import pytest

from elastictrain.preflight.verdict import Scope, Status, Verdict, failures, worst_first
from tests.unit.preflight.made import verdict


@pytest.mark.parametrize("status", [Status.SKIP, Status.WARN, Status.FAIL])
def test_whatever_did_not_pass_needs_a_remedy(status: Status) -> None:
    with pytest.raises(ValueError, match=f"check 'mtu' says {status} of a without a remedy"):
        Verdict(check="mtu", scope=Scope.HOST, subject="a", status=status)


def test_the_worst_comes_first_and_the_rest_stays_in_order() -> None:
    found = [verdict(status, subject=str(number)) for number, status in enumerate(["pass", "fail", "skip", "warn", "fail"])]
    assert [one.subject for one in worst_first(found)] == ["1", "4", "3", "2", "0"]
    assert [one.subject for one in failures(found)] == ["1", "4"]
