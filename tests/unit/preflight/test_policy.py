import pytest

from elastictrain.preflight.policy import Ended, Level, apply_modes, choose_level, wanted_checks
from tests.unit.preflight.made import verdict

HANG = [Ended(rank, 71) for rank in range(3)]


@pytest.mark.parametrize(
    ("wanted", "first", "ended", "level"),
    [
        ("off", True, HANG, "off"),
        ("quick", True, HANG, "quick"),
        ("full", False, [], "full"),
        ("auto", True, [], "full"),
        ("auto", False, [], "quick"),
        ("auto", False, HANG, "full"),
        # A rank that said nothing was killed: that the others then failed says nothing about the network.
        ("auto", False, HANG[:2], "quick"),
        ("auto", False, [Ended(rank, 75) for rank in range(3)], "quick"),
        ("auto", False, [Ended(0, 70), Ended(1, 71), Ended(2, 71)], "full"),
    ],
)
def test_the_level_follows_from_how_the_last_incarnation_ended(
    wanted: str, first: bool, ended: list[Ended], level: str
) -> None:
    chosen, reason = choose_level(wanted, first_start=first, ended=ended, world_size=3)
    assert chosen == Level(level)
    assert reason


def test_what_is_off_is_left_out_and_what_only_warns_does_not_fail() -> None:
    found = [verdict("fail", check="mtu"), verdict("fail", check="disk"), verdict("fail", check="xid"), verdict(check="mtu")]
    kept = apply_modes(found, {"mtu": "warn", "disk": "off"})
    assert [(one.check, one.status) for one in kept] == [("mtu", "warn"), ("xid", "fail"), ("mtu", "pass")]
    assert wanted_checks(["mtu", "disk", "xid"], {"mtu": "warn", "disk": "off"}) == {"mtu", "xid"}
