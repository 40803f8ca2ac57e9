"""Which run and which checkpoint a URL names, and which one a start would take."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from elastictrain.checkpoint.commands.survey import (
    CheckpointRow,
    CheckpointState,
    locate,
    resume_choice,
    split_url,
)
from elastictrain.errors import ConfigError, ObjectNotFoundError, UsageError
from elastictrain.storage.opening import open_store
from tests.integration.checkpoint.commands.made import save

NAME = "step-000000400"


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("runs/a", ("a", "runs")),
        ("runs/a/", ("a", "runs")),
        ("a", ("a", ".")),
        ("/a", ("a", "/")),
        ("s3://bucket/runs/a/", ("a", "s3://bucket/runs")),
        ("s3://bucket/a", ("a", "s3://bucket")),
        ("s3://bucket", ("", "s3://bucket")),
        ("file:///a/b", ("b", "file:///a")),
    ],
)
def test_urls_are_split_at_the_last_part(url: str, parts: tuple[str, str]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize("ending", ["", "/"])
@pytest.mark.parametrize(
    ("below", "folder"),
    [("", None), ("/checkpoints", None), (f"/checkpoints/{NAME}", NAME), ("/checkpoints/step-000000007", "step-000000007")],
)
def test_a_run_and_what_is_in_it(below: str, folder: str | None, ending: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 400)
    location = locate(f"{tmp_path}/run{below}{ending}")
    assert location.folder == folder
    assert location.url == f"{tmp_path}/run/checkpoints"
    assert next(location.run.list("checkpoints")).key.startswith(f"checkpoints/{NAME}/")


@pytest.mark.parametrize(
    ("below", "url", "folder"), [("", ".", None), ("checkpoints", "..", None), (f"checkpoints/{NAME}", "../..", NAME)]
)
def test_the_current_folder(below: str, url: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 400)
    monkeypatch.chdir(tmp_path / below)
    location = locate(".")
    assert (location.run.url, location.folder) == (url, folder)
    assert next(location.run.list("checkpoints"), None) is not None


def test_a_run_whose_own_name_is_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 400)
    assert locate(f"{tmp_path}/checkpoints").run.url == f"{tmp_path}/checkpoints"
    assert locate(f"{tmp_path}/checkpoints/checkpoints").run.url == f"{tmp_path}/checkpoints"


def test_a_bucket_in_memory() -> None:
    open_store("memory://located/run").write("checkpoints/committed.json", b"{}")
    assert locate("memory://located/run/checkpoints/").run.url == "memory://located/run"


def test_a_run_that_has_saved_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert locate(str(tmp_path)).run.url == str(tmp_path)


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for url in (f"{tmp_path}/nowhere", f"{tmp_path}/data", "memory://nothing/here"):
        with pytest.raises(ObjectNotFoundError, match=url):
            locate(url)
    with pytest.raises(UsageError, match=f"RUN/checkpoints/{NAME}"):
        locate(f"{tmp_path}/{NAME}")
    with pytest.raises(ConfigError, match="foo"):
        locate("foo://bucket/run")


ROW = CheckpointRow(
    name="x",
    step=0,
    tier="storage",
    state=CheckpointState.VALID,
    reason="",
    created=0.0,
    modified=0.0,
    size_bytes=0,
    world_size=1,
    num_files=1,
)


def rows(*states: CheckpointState) -> list[CheckpointRow]:
    return [replace(ROW, name=str(number), step=10 - number, state=state) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ((), None),
        ((CheckpointState.VALID, CheckpointState.VALID), "0"),
        ((CheckpointState.UNCOMMITTED, CheckpointState.QUARANTINED, CheckpointState.DAMAGED, CheckpointState.VALID), "3"),
        ((CheckpointState.UNCOMMITTED, CheckpointState.DAMAGED), None),
        ((CheckpointState.UNKNOWN, CheckpointState.VALID), None),
        ((CheckpointState.VALID, CheckpointState.UNKNOWN), "0"),
    ],
)
def test_what_a_start_takes(states: tuple[CheckpointState, ...], chosen: str | None) -> None:
    found = resume_choice(rows(*states))
    assert (found.name if found else None) == chosen
