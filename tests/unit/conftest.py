"""What unit tests and integration tests share: Hydra composes each recipe once."""

from collections.abc import Iterator

import pytest

from elastictrain.config import compose
from tests.composed import Compose, composed_once


@pytest.fixture(scope="session", autouse=True)
def hydra_compose() -> Iterator[Compose]:
    """Hydra itself, for the tests that are about it."""
    really = compose.hydra_compose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "hydra_compose", composed_once(really))
        yield really
