from elastictrain.preflight.history import STARTS, find_repeated
from tests.unit.preflight.made import verdict

SLOW = {"check": "bandwidth", "subject": "b"}
FLAPS = {"check": "counters", "subject": "c"}


def test_what_comes_again_and_again_is_told() -> None:
    now = [
        verdict("warn", check="counters", subject="c"),
        verdict("fail", check="bandwidth", subject="b"),
        verdict(check="mtu"),
    ]
    found = find_repeated(now, [[SLOW], [], [SLOW, FLAPS], [{"check": "mtu", "subject": "a"}]])
    assert [str(one) for one in found] == [
        "bandwidth of b: 3 of the last 5 starts",
        "counters of c: 2 of the last 5 starts",
    ]


def test_what_is_new_is_not() -> None:
    assert find_repeated([verdict("fail", check="disk", subject="b")], [[SLOW]]) == []
    assert find_repeated([verdict("fail", check="bandwidth", subject="b")], []) == []


def test_what_is_long_ago_is_forgotten_and_garbled_rows_say_nothing() -> None:
    before = [[SLOW], *([{}] for _ in range(STARTS - 1))]
    assert find_repeated([verdict("fail", check="bandwidth", subject="b")], before) == []
