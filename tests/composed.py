"""Hydra composes each choice of groups once: that takes 50 ms, and most tests are about what comes after it."""

import copy
from collections.abc import Callable

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

Compose = Callable[[str, list[str]], DictConfig]


def composed_once(really: Compose) -> Compose:
    """`really`, Hydra's function, with a memory."""
    # Values are laid over what Hydra has composed: only the groups' choices are Hydra's.
    composed: dict[tuple[str, ...], DictConfig] = {}

    def once(name: str, overrides: list[str]) -> DictConfig:
        if any(one.startswith("hydra.searchpath=") for one in overrides):
            return really(name, overrides)
        key = (*(source.path for source in GlobalHydra.instance().config_loader().get_sources()), name, *overrides)
        if key not in composed:
            composed[key] = really(name, overrides)
        return copy.deepcopy(composed[key])

    return once
