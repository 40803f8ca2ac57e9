"""How an environment is refused, and what is said of one that is not."""

from collections.abc import Iterable, Mapping

import pytest

from elastictrain.errors import EXIT_CONFIG, ConfigError
from elastictrain.launch.cluster.detect import detect


def refused(environment: Mapping[str, str]) -> dict[str, str]:
    """What is said of each variable that is wrong."""
    with pytest.raises(ConfigError) as caught:
        detect(environment)
    assert caught.value.exit_code == EXIT_CONFIG
    return {problem.key: problem.message for problem in caught.value.problems}


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    """A copy that lacks some variables, which must have been there."""
    assert set(names) <= set(environment)
    return {name: value for name, value in environment.items() if name not in names}


def told(sentences: Iterable[str], *parts: str) -> bool:
    """Whether one of the sentences has all of these in it: figures, variables and their values."""
    return any(all(part in sentence for part in parts) for sentence in sentences)
