"""With a key nobody who can only write to the folder gets anything loaded; without one everything is as before."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from elastictrain.checkpoint.__main__ import main
from elastictrain.checkpoint.checkpointer import Checkpointer
from elastictrain.checkpoint.manifest import ChunkRecord, digest_of
from elastictrain.checkpoint.reader import ManifestReader
from elastictrain.checkpoint.signing import LEAST_BYTES, SigningKey, load_key
from elastictrain.checkpoint.verified_read import CheckpointFolder, DamagedFileError, read_chunks
from elastictrain.config.composed import CheckpointGroup
from elastictrain.errors import (
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_USAGE,
    NoValidCheckpointError,
    UntrustedCheckpointError,
)
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import Document, change_manifest, folders, shard, state_of
from tests.unit.checkpoint.fakes import FakeStore

NAME, OTHER = "KEY_OF_THE_TEST", "ANOTHER_KEY_OF_THE_TEST"
KEY = SigningKey(NAME, b"k" * LEAST_BYTES)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "k" * LEAST_BYTES)
    monkeypatch.setenv(OTHER, "o" * LEAST_BYTES)


def checkpointer(run: Path, key: SigningKey | None, *, manifest_mb: float = 4.0) -> Checkpointer:
    return Checkpointer(
        open_store(str(run)),
        options=CheckpointGroup(manifest_mb=manifest_mb),
        group=None,
        rank=0,
        world_size=1,
        incarnation="000009-zz",
        config_digest="digest",
        record=lambda event: None,
        signing=key,
    )


@pytest.fixture(params=[4.0, 0.0], ids=["whole", "parts"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run with two signed checkpoints."""
    for step in (1, 2):
        checkpointer(tmp_path, KEY, manifest_mb=request.param).save(
            step, tensors=state_of(step), state={"step": step}, reason="step"
        )
    return tmp_path


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000000002"


def restored_step(run: Path, key: SigningKey | None) -> int:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    restored = checkpointer(run, key).restore(tensors=tensors, reset=lambda: None)
    assert restored is not None
    assert torch.equal(tensors["optim.step"], state_of(restored.step)["optim.step"])
    return restored.step


def forge_data(folder: Path) -> None:
    """Another value for a weight, under fast digests that are all right."""
    path = shard(folder)
    raw = bytearray(path.read_bytes())

    def act(document: Document) -> None:
        (chunk,) = document["tensors"]["model.weight"]["chunks"]
        begin, end = chunk["start"], chunk["start"] + chunk["bytes"]
        raw[begin] ^= 1
        chunk["digest"] = digest_of(raw[begin:end])
        document["files"][0]["digest"] = digest_of(raw)

    change_manifest(folder, act)
    path.write_bytes(raw)


def sign_with(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        assert main(["sign", str(folder), "--key-env", name]) == EXIT_OK

    return act


def forge_and_drop(folder: Path) -> None:
    forge_data(folder)
    change_manifest(folder, lambda document: document.pop("signature"))


def forge_and_sign(folder: Path) -> None:
    forge_data(folder)
    sign_with(OTHER)(folder)


def change_sha256(document: Document) -> None:
    document["tensors"]["model.weight"]["chunks"][0]["sha256"] = "0" * 64


UNTRUSTED: dict[str, Callable[[Path], None]] = {
    "data and fast digests": forge_data,
    "the same, without the signature": forge_and_drop,
    "the same, signed with another key": forge_and_sign,
    "the signature dropped": lambda folder: change_manifest(folder, lambda document: document.pop("signature")),
    "a signature of nothing": lambda folder: change_manifest(folder, lambda document: document.update(signature="")),
    "a signature that is no text": lambda folder: change_manifest(folder, lambda document: document.update(signature=[1])),
    "a signature in another script": lambda folder: change_manifest(folder, lambda document: document.update(signature="ä")),
    "the step": lambda folder: change_manifest(folder, lambda document: document["state"].update(skipped_total=9)),
    "a SHA-256": lambda folder: change_manifest(folder, change_sha256),
    "the manifest of another step": lambda folder: change_manifest(
        folder, lambda document: document.update(step=3) or document["state"].update(step=3)
    ),
}


def test_what_is_signed_is_taken_with_the_key_and_without(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert restored_step(run, KEY) == 2
    assert not caplog.records
    assert restored_step(run, None) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for command in (["verify"], ["ls"], ["prune", "--keep-last", "1", "--dry-run"]):
        for options in ([], ["--key-env", NAME]):
            assert main([command[0], str(run), *command[1:], *options]) == EXIT_OK


@pytest.mark.parametrize("act", UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_forgery_is_passed_over_and_not_marked(run: Path, tmp_path: Path, act: Callable[[Path], None]) -> None:
    act(newest(run))
    assert restored_step(run, KEY) == 1
    assert not (newest(run) / "quarantine.json").exists()
    assert main(["verify", str(run), "--key-env", NAME]) == EXIT_STORAGE
    assert main(["prune", str(run), "--keep-last", "1", "--yes", "--key-env", NAME]) == EXIT_STORAGE
    assert len(folders(run)) == 2
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--to", "safetensors", "--step", "2", "--key-env", NAME]) == EXIT_STORAGE
    assert main(["diff", str(newest(run)), str(run), "--key-env", NAME]) == EXIT_STORAGE
    with pytest.raises(UntrustedCheckpointError):
        assert ManifestReader.at(str(newest(run)), key_env=NAME).manifest


def test_without_the_key_the_same_forgery_is_taken(run: Path) -> None:
    """What fast digests are for: accidents."""
    forge_and_drop(newest(run))
    assert restored_step(run, None) == 2
    assert main(["verify", str(run)]) == EXIT_OK


def test_where_nothing_is_signed_a_run_with_a_key_does_not_start(run: Path) -> None:
    for folder in folders(run):
        forge_and_drop(run / "checkpoints" / folder)
    with pytest.raises(NoValidCheckpointError, match=NAME):
        restored_step(run, KEY)
    assert all(not (run / "checkpoints" / folder / "quarantine.json").exists() for folder in folders(run))


def test_data_that_has_its_fast_digest_and_is_other_data_all_the_same() -> None:
    """Colliding bytes can be made for the fast one."""
    data = b"some data"
    chunk = ChunkRecord((0,), (9,), "f", 0, 9, digest_of(data), "0" * 64)
    with pytest.raises(DamagedFileError):
        read_chunks(CheckpointFolder(FakeStore({"f": data}), ""), [chunk], take=lambda _, __: None)


@pytest.mark.parametrize("manifest_mb", [4.0, 0.0])
def test_an_existing_run_is_signed(manifest_mb: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        checkpointer(tmp_path, None, manifest_mb=manifest_mb).save(
            step, tensors=state_of(step), state={"step": step}, reason="step"
        )
    assert main(["ls", str(tmp_path), "--json", "--key-env", NAME]) == EXIT_OK
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["state"], row["signed"], row["resume"]) for row in rows] == [("untrusted", None, False)] * 2
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
    assert main(["sign", str(tmp_path), "--key-env", NAME]) == EXIT_OK
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json", "--key-env", NAME]) == EXIT_OK
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["state"], row["signed"], row["resume"]) for row in rows] == [("valid", True, True), ("valid", True, False)]
    assert restored_step(tmp_path, KEY) == 2
    assert {file: file.read_bytes() for file in before} == before
    assert not re.search(r"k{32}", "".join(file.read_text("latin-1") for file in tmp_path.rglob("*.json")))


def test_what_is_damaged_is_not_signed(run: Path) -> None:
    path = shard(newest(run))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = (newest(run) / "manifest.json").read_bytes()
    assert main(["sign", str(run), "--key-env", OTHER]) == EXIT_STORAGE
    assert (newest(run) / "manifest.json").read_bytes() == before


def test_bytes_of_a_manifest_without_a_key_are_as_they_were(tmp_path: Path) -> None:
    checkpointer(tmp_path, None).save(2, tensors=state_of(2), state={"step": 2}, reason="step")
    raw = (newest(tmp_path) / "manifest.json").read_bytes()
    assert b"sha256" not in raw
    assert b"signature" not in raw


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_script_of_ones_own_checks_the_signature(run: Path) -> None:
    flat = {"optim.step": torch.tensor(0.0)}
    dcp.load(flat, storage_reader=ManifestReader.at(str(newest(run)), key_env=NAME))
    assert flat["optim.step"].item() == 2.0


@pytest.mark.parametrize("value", [None, "", "short", "x" * (LEAST_BYTES - 1)])
def test_a_key_that_is_none_is_refused(value: str | None, run: Path) -> None:
    environ = {} if value is None else {"A_KEY": value}
    with pytest.raises(ValueError, match="A_KEY"):
        load_key("A_KEY", environ=environ)
    assert load_key("", environ=environ) is None
    assert main(["ls", str(run), "--key-env", "NO_SUCH_KEY_ANYWHERE"]) == EXIT_USAGE


def test_a_key_is_not_shown() -> None:
    assert "kkk" not in repr(KEY)
