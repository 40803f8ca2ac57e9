"""A stored run is data: no command imports a module that it names."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastictrain.checkpoint.__main__ import main as checkpoint
from elastictrain.config.digest import from_yaml, to_yaml
from elastictrain.config.load import load
from elastictrain.data.__main__ import main as data
from elastictrain.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE, ConfigError
from elastictrain.storage.opening import open_store
from elastictrain.train.checks import check_run_folder
from tests.integration.checkpoint.commands.made import save
from tests.integration.checkpoint.commands.tasks import ExportingTask

TRAP = "trap_of_a_stranger"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose configuration names a module that can be imported, and leaves a trace when it is."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / f"{TRAP}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()\nclass Task: ...\n")
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.delitem(sys.modules, TRAP, raising=False)
    run = tmp_path / "run"
    for step in (10, 20):
        save(run, step)
    (run / "config.yaml").write_text(f"task:\n  _target_: {TRAP}.Task\n")
    return run


COMMANDS: tuple[tuple[Callable[[list[str]], int], list[str], int], ...] = (
    (checkpoint, ["ls", "RUN"], EXIT_OK),
    (checkpoint, ["ls", "RUN", "--json"], EXIT_OK),
    (checkpoint, ["verify", "RUN", "--all"], EXIT_OK),
    (checkpoint, ["prune", "RUN", "--keep-last", "1", "--yes"], EXIT_OK),
    (checkpoint, ["diff", "RUN", "RUN"], EXIT_OK),
    (checkpoint, ["export", "RUN", "OUT", "--to", "torch"], EXIT_OK),
    (checkpoint, ["export", "RUN", "OUT", "--to", "safetensors"], EXIT_OK),
    (checkpoint, ["export", "RUN", "OUT", "--to", "dcp"], EXIT_OK),
    (checkpoint, ["export", "RUN", "OUT", "--to", "hf"], EXIT_USAGE),
    (checkpoint, ["export", "RUN", "OUT", "--to", "hf", "--task", f"{ExportingTask.__module__}.ExportingTask"], EXIT_OK),
    (data, ["inspect", "RUN"], EXIT_CONFIG),
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("main", "arguments", "code"), COMMANDS)
def test_commands_import_nothing_that_it_names(
    main: Callable[[list[str]], int], arguments: list[str], code: int, run: Path, tmp_path: Path
) -> None:
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    assert main([places.get(argument, argument) for argument in arguments]) == code
    assert TRAP not in sys.modules
    assert not (tmp_path / "sprung").exists()


def test_a_start_imports_nothing_that_it_names(run: Path, tmp_path: Path) -> None:
    config = load(["recipe=digits_ddp", f"run.dir={run}"], with_task=False)
    stored = to_yaml(config).replace(f"_target_: {config.task.target}", f"_target_: {TRAP}.Task")
    assert from_yaml(stored, source="here")["task"] != config.task
    (run / "config.yaml").write_text(stored)
    with pytest.raises(ConfigError) as caught:
        check_run_folder(open_store(str(run)), config, task=ExportingTask())
    assert [problem.key for problem in caught.value.problems] == ["task._target_"]
    assert TRAP not in sys.modules
    assert not (tmp_path / "sprung").exists()
