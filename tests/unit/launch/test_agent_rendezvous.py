from collections.abc import Collection

import pytest

from elastictrain.launch.agent import find_missing, why_not_met

HOSTS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("came", "index", "missing"),
    [
        (None, 0, ()),
        (None, 1, (0,)),
        ({1}, 0, (2,)),
        ({1}, 1, (2,)),
        (set(), 0, (1, 2)),
        (set(), 2, (1,)),
        # All others have come to a store that answers: what is not through is the first host.
        ({1, 2}, 1, (0,)),
        ({1, 2}, 0, ()),
        ({0, 1, 2}, 2, (0,)),
    ],
)
def test_who_has_not_come(came: Collection[int] | None, index: int, missing: tuple[int, ...]) -> None:
    assert find_missing(came, index=index, count=3) == missing


@pytest.mark.parametrize(("missing", "named"), [((), "a"), ((0,), "a"), ((1,), "b"), ((1, 2), "b and c")])
def test_the_sentence_names_the_hosts_the_store_and_the_key(missing: tuple[int, ...], named: str) -> None:
    sentence = why_not_met(missing, HOSTS, "10.0.0.1:5000", after_s=900)
    for part in (named, "10.0.0.1:5000", "900 s", "`fault.rendezvous_timeout_s`"):
        assert part in sentence
