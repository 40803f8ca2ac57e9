import pytest

from tests.integration.simulated.partitions import play


@pytest.mark.parametrize("seed", range(25))
def test_a_network_that_falls_apart_never_ends_a_run_and_never_makes_two_of_it(seed: int) -> None:
    """`scripts/simulate_partitions.py` plays many more."""
    play(seed)
