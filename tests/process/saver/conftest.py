"""These tests share the module `faultyruns`, and the run that nothing happens to."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faultyruns import ARGUMENTS, STEPS, check_nothing_left
from torchruns import alone, losses


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*ARGUMENTS, "task.pause_s=0", f"train.steps={STEPS}", f"run.dir={folder}/job/run"]
    code, output = alone(arguments, folder=folder / "job")
    assert code == 0, output
    check_nothing_left(folder)
    return losses(folder / "job/run")
