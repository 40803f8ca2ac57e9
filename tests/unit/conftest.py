"""Hydra composes each recipe once: that takes 50 ms, and hundreds of tests are about what comes after it."""

import copy
from collections.abc import Callable, Iterator

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from elastictrain.config import compose


@pytest.fixture(scope="session", autouse=True)
def hydra_compose() -> Iterator[Callable[[str, list[str]], DictConfig]]:
    """Hydra itself, for the tests that are about it."""
    # Values are laid over what Hydra has composed: only the groups' choices are Hydra's.
    composed: dict[tuple[str, ...], DictConfig] = {}
    really = compose.hydra_compose

    def once(name: str, overrides: list[str]) -> DictConfig:
        if any(one.startswith("hydra.searchpath=") for one in overrides):
            return really(name, overrides)
        key = (*(source.path for source in GlobalHydra.instance().config_loader().get_sources()), name, *overrides)
        if key not in composed:
            composed[key] = really(name, overrides)
        return copy.deepcopy(composed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "hydra_compose", once)
        yield really
