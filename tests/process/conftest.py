"""The process tests share the module `torchruns`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from torchruns import kill, savers


@pytest.fixture(scope="session", autouse=True)
def no_saver_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Savers whose storage is gone for good keep what it refused for half a day."""
    yield
    for saver in savers(tmp_path_factory.getbasetemp()):
        kill(saver)
