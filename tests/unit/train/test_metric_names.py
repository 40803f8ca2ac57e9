import pytest

from elastictrain.errors import ConfigError
from elastictrain.train.metric_names import MetricNames, describe_difference


def test_the_first_rank_that_differs_is_named() -> None:
    assert describe_difference([["a", "b"]] * 3) == ""
    assert describe_difference([[], [], ["a"], ["b"]]) == "[] on rank 0 and ['a'] on rank 2"
    # As many, so that a sum over the ranks would not notice.
    assert describe_difference([["a", "b"], ["a", "c"]])


def test_later_steps_are_compared_with_the_first_one() -> None:
    names = MetricNames(None)
    for _ in range(2):
        names.check("`loss`", ("even",))
        names.check("`loss` in an evaluation", ())
    with pytest.raises(ConfigError):
        names.check("`loss`", ("odd",))
