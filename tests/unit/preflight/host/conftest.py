from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastictrain.preflight.surroundings import Surroundings

HostMaker = Callable[[Mapping[str, str]], Surroundings]


@pytest.fixture
def make_host(tmp_path: Path) -> HostMaker:
    """Makes a host `h1` up from the texts of its files, by path."""

    def make(files: Mapping[str, str]) -> Surroundings:
        root = tmp_path / "root"
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Surroundings(host="h1", root=root, environment={})

    return make
