"""Objects in a run's folder that no run writes: each is refused by name, and a start goes back to what is whole."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.commands.survey import show_checkpoints
from elastictrain.checkpoint.commands.verify import verify_checkpoints
from elastictrain.checkpoint.lineage import Lineage
from elastictrain.checkpoint.manifest import digest_of
from elastictrain.checkpoint.run_folder import read_stored_config
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import EXIT_OK, EXIT_STORAGE, ConfigError
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import save, state_of


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(30 << 30)


def holding(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def with_number(text: str) -> Callable[[Path], None]:
    """The manifest with one number replaced; its digest is right where it can be computed."""

    def act(path: Path) -> None:
        document = json.loads(path.read_bytes())
        del document["digest"]
        document["tensors"]["model.weight"]["shape"][0] = "THE NUMBER"
        plain = json.dumps(document, sort_keys=True, separators=(",", ":")).replace('"THE NUMBER"', text)
        stated = f'"digest":"{digest_of(plain.encode())}",'
        at = plain.index('"digest_algorithm"')
        path.write_bytes((plain[:at] + stated + plain[at:]).encode())

    return act


def twice(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b',"step":1}')


OBJECTS: dict[str, Callable[[Path], None]] = {
    "30 GB of nothing": sparse,
    "empty": holding(b""),
    "brackets": holding(b"[" * 200_000),
    "closed brackets": holding(b"[" * 200_000 + b"]" * 200_000),
    "braces": holding(b'{"a":' * 200_000),
    "not UTF-8": holding(b'{"format":"\xff"}'),
    "UTF-16": holding('{"format":"elastictrain-checkpoint"}'.encode("utf-16")),
    "a number of 5,000 digits": with_number("9" * 5_000),
    "a number of 100 digits": with_number("9" * 100),
    "an endless shape": with_number("1e999"),
    "no number": with_number("NaN"),
    "a negative size": with_number("-6"),
    "a broken size": with_number("6.0"),
    "a key twice": twice,
    "half of a character": holding(b'{"format":"\\ud800"}'),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, step)
    return tmp_path


def restored_step(run: Path) -> int:
    checkpointer = Checkpointer(
        open_store(str(run)),
        options=CheckpointGroup(),
        group=None,
        rank=0,
        world_size=1,
        incarnation="000009-zz",
        config_digest="digest",
        record=lambda event: None,
    )
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    restored = checkpointer.restore(tensors=tensors, reset=lambda: None)
    assert restored is not None
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state_of(restored.step).items())
    return restored.step


@pytest.mark.parametrize("act", OBJECTS.values(), ids=OBJECTS)
def test_a_manifest(run: Path, act: Callable[[Path], None]) -> None:
    act(run / "checkpoints" / "step-000000002" / "manifest.json")
    began = time.monotonic()
    assert verify_checkpoints(str(run), every=False, step=2, threads=1, as_json=True) == EXIT_STORAGE
    assert restored_step(run) == 1
    assert show_checkpoints(str(run), as_json=True, memory_dir="/nowhere") == EXIT_OK
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("act", OBJECTS.values(), ids=OBJECTS)
def test_a_mark(run: Path, act: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it holds, its presence counts."""
    mark = run / "checkpoints" / "step-000000002" / "quarantine.json"
    mark.write_bytes((run / "checkpoints" / "step-000000002" / "manifest.json").read_bytes())
    act(mark)
    assert show_checkpoints(str(run), as_json=True, memory_dir="/nowhere") == EXIT_OK
    (found, _) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found["state"] == "quarantined"
    assert restored_step(run) == 1


@pytest.mark.parametrize(
    "name", [name for name in OBJECTS if "number" not in name and "size" not in name and "shape" not in name]
)
def test_a_record_of_lineage_tells_nothing(run: Path, name: str) -> None:
    record = run / "lineage" / "000000001-000001-aa.json"
    record.parent.mkdir()
    record.write_bytes(b'{"generation":1,"incarnation":"000001-aa","step":0,"parent":""}')
    store = open_store(str(run))
    assert not Lineage(store).has("000000-zz", 5)
    OBJECTS[name](record)
    assert Lineage(store).has("000000-zz", 5)
    assert restored_step(run) == 2


def test_a_configuration_of_30_gb(run: Path) -> None:
    sparse(run / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_stored_config(open_store(str(run)))
