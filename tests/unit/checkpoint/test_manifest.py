import pytest

from elastictrain.checkpoint.manifest import StateCounters, counters_of


def test_what_a_state_lacks_was_never_counted() -> None:
    assert counters_of({}, step=3) == StateCounters(3)
    state = {"step": 3, "positions": 48, "skipped_in_a_row": 1, "skipped_total": 2, "data_digest": "d"}
    assert counters_of(state, step=3) == StateCounters(3, 1, 2, 48, "d")


@pytest.mark.parametrize("name", ["step", "positions", "skipped_in_a_row", "skipped_total"])
@pytest.mark.parametrize("value", [None, -1, "7", 1.5, True, 2**63])
def test_a_counter_that_is_none_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        counters_of({name: value}, step=1)  # type: ignore[dict-item]
