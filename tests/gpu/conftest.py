"""Tests on CUDA devices reuse the process tests' torchrun."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            needed = 1 if item.get_closest_marker("one_device") else 2
            if torch.cuda.device_count() < needed:
                reason = f"needs {needed} CUDA devices, this host shows {torch.cuda.device_count()}"
                item.add_marker(pytest.mark.skip(reason=reason))
