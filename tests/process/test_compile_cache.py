"""Compiled code in the run's folder: a start on a host that has none compiles nothing, and trains bit for bit the same."""

from pathlib import Path
from typing import Any

from torchruns import COMPILED, TINY, alone, events, losses

STEPS = 30


def start(run_dir: Path, *, host: Path, folder: Path) -> dict[str, Any]:
    """A run from its first step on a host whose temporary files are in `host`; returns its event `compiled`."""
    host.mkdir(exist_ok=True)
    arguments = [
        *TINY,
        *COMPILED,
        *(f"train.steps={STEPS}", "train.eval_every_steps=0", "checkpoint.every_steps=0"),
        *(f"run.dir={run_dir}", f"checkpoint.memory_dir={host}"),
    ]
    code, output = alone(arguments, folder=folder, extra_environment={"TMPDIR": str(host)})
    assert code == 0, output[-6000:]
    (event,) = events(run_dir, "compiled")
    return event


def with_archive_of(earlier: Path, run_dir: Path) -> Path:
    """A new run with the compiled code of an earlier one."""
    (run_dir / "compile_cache").mkdir(parents=True)
    (archive,) = (earlier / "compile_cache").iterdir()
    copy = run_dir / "compile_cache" / archive.name
    copy.write_bytes(archive.read_bytes())
    copy.chmod(0o600)
    return copy


def test_another_host_compiles_nothing_and_a_damaged_archive_is_left_alone(tmp_path: Path) -> None:
    first = start(tmp_path / "first", host=tmp_path / "host1", folder=tmp_path)
    assert (first["loaded"], first["found_files"]) == (None, 0)
    assert first["new_files"] > 0
    archive = with_archive_of(tmp_path / "first", tmp_path / "second")
    second = start(tmp_path / "second", host=tmp_path / "host2", folder=tmp_path)
    assert second["loaded"] == first["stored"] == f"compile_cache/{archive.name}"
    assert (second["found_files"], second["new_files"], second["stored"]) == (first["new_files"], 0, None)
    # This host has not read it yet, as its name says.
    copy = with_archive_of(tmp_path / "first", tmp_path / "third")
    damaged = copy.rename(copy.with_name(f"{copy.name[:-16]}{'0' * 16}"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    third = start(tmp_path / "third", host=tmp_path / "host2", folder=tmp_path)
    assert (third["loaded"], third["found_files"], third["new_files"]) == (None, first["new_files"], 0)
    assert third["stored"] == first["stored"]
    assert losses(tmp_path / "first") == losses(tmp_path / "second") == losses(tmp_path / "third")
    assert len(losses(tmp_path / "first")) == STEPS
