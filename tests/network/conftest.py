"""Network tests reuse the process tests' torchrun, on hosts of their own; they need root and network namespaces."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _folder in (Path(__file__).parent, Path(__file__).parents[1] / "process"):
    sys.path.insert(0, str(_folder))

from hosts import start_warm  # noqa: E402

from elastictrain.chaos.network.hosts import VirtualNetwork  # noqa: E402
from elastictrain.chaos.network.namespaces import unavailable  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    reason = unavailable() if ours else None
    for item in ours:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def network(tmp_path: Path) -> Iterator[VirtualNetwork]:
    """A switch without hosts yet."""
    with VirtualNetwork(tmp_path / "network", start=start_warm) as switched:
        yield switched
