from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from tests.unit.storage.conformance import CHECKS


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Store], None], kind: str, tmp_path: Path) -> None:
    check(open_store(str(tmp_path / "not/there/yet") if kind == "local" else f"memory://{uuid4().hex}/run"))
