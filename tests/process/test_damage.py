"""A run whose checkpoints were damaged behind its back, whose configuration was changed, or that is resumed again and again."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchruns import TINY, alone, events, last_step, losses, started, wait_until

from elastictrain.checkpoint.manifest import digest_of

STEPS = 30
NEWEST, BEFORE, OLDEST = (f"step-{step:09d}" for step in (30, 25, 20))
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    f"train.steps={STEPS}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=5",
    "checkpoint.keep_last=3",
    "checkpoint.manifest_mb=0",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with three checkpoints, at the very steps that were asked for: training waits for each."""
    folder = tmp_path_factory.mktemp("trained")
    code, output = alone([*ARGUMENTS, "checkpoint.buffers=0", f"run.dir={folder}/run"], folder=folder)
    assert code == 0, output
    assert sorted(found.name for found in (folder / "run/checkpoints").glob("step-*")) == [OLDEST, BEFORE, NEWEST]
    return folder / "run"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to play with."""
    return shutil.copytree(trained, tmp_path / "run")


def start_again(run_dir: Path, *more: str) -> tuple[int, str]:
    return alone([*ARGUMENTS, f"run.dir={run_dir}", *more], folder=run_dir.parent)


def only_shard(checkpoint: Path) -> Path:
    (shard,) = checkpoint.glob("*.safetensors")
    return shard


def flip_a_byte(checkpoint: Path) -> Path:
    shard = only_shard(checkpoint)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)
    return shard


def truncate(checkpoint: Path) -> Path:
    shard = only_shard(checkpoint)
    shard.write_bytes(shard.read_bytes()[:-1])
    return shard


def delete_shard(checkpoint: Path) -> Path:
    shard = only_shard(checkpoint)
    shard.unlink()
    return shard


def flip_a_part(checkpoint: Path) -> Path:
    (part,) = checkpoint.glob("*-part.json")
    data = part.read_bytes()
    part.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
    return part


def delete_manifest(checkpoint: Path) -> Path:
    manifest = checkpoint / "manifest.json"
    manifest.unlink()
    return manifest


def garble_manifest(checkpoint: Path) -> Path:
    """Still JSON: only its digest can tell."""
    manifest = checkpoint / "manifest.json"
    content = json.loads(manifest.read_text())
    content["state"]["step"] += 1
    manifest.write_text(json.dumps(content))
    return manifest


def cut_manifest(checkpoint: Path) -> Path:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:200])
    return manifest


def contents(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def rejections(run_dir: Path) -> dict[str, str]:
    return {row["checkpoint"]: row["file"] for row in events(run_dir, "checkpoint_rejected")}


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, delete_shard, flip_a_part, delete_manifest, garble_manifest])
def test_damage_is_named_and_the_previous_checkpoint_used(damage: Callable[[Path], Path], run_dir: Path) -> None:
    culprit = damage(run_dir / "checkpoints" / NEWEST)
    code, output = start_again(run_dir)
    assert code == 0, output
    assert rejections(run_dir) == {NEWEST: culprit.name}
    assert any(NEWEST in line and culprit.name in line for line in output.splitlines()), output
    resumed = events(run_dir, "resume")[-1]
    assert (resumed["step"], resumed["checkpoint"]) == (25, BEFORE)
    # The steps that were done again came out as before: `losses` compares.
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))
    assert len(events(run_dir, "step")) == STEPS + 5


def test_all_damaged_stops_until_told_to_start_over(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    flip_a_byte(checkpoints / NEWEST)
    delete_shard(checkpoints / BEFORE)
    cut_manifest(checkpoints / OLDEST)
    before = contents(checkpoints)

    code, output = start_again(run_dir)
    assert code == 74, output
    assert "checkpoint.on_invalid=fresh" in output
    assert "Traceback" not in output
    for name in (NEWEST, BEFORE, OLDEST):
        assert name in output
    after = contents(checkpoints)
    assert {name: after.get(name) for name in before} == before
    assert rejections(run_dir).keys() == {NEWEST, BEFORE, OLDEST}

    # Asking again does not change its mind, and the reasons are still told.
    code, again = start_again(run_dir)
    assert code == 74, again
    assert "checkpoint.on_invalid=fresh" in again

    code, output = start_again(run_dir, "checkpoint.on_invalid=fresh")
    assert code == 0, output
    begun = events(run_dir, "resume")[-1]
    assert (begun["step"], begun["tier"], begun["checkpoint"]) == (0, "none", None)
    told = {row["checkpoint"] for row in events(run_dir, "checkpoint_rejected") if row["incarnation"] == begun["incarnation"]}
    assert told == {NEWEST, BEFORE, OLDEST}
    assert len(events(run_dir, "step")) == 2 * STEPS
    assert sorted(losses(run_dir)) == list(range(1, STEPS + 1))


def test_a_changed_answer_stops_until_told_to_continue(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints" / NEWEST)
    before = contents(run_dir)
    code, output = start_again(run_dir, "run.seed=1")
    assert code == 78, output
    assert "`run.seed`" in output
    assert "run.on_change=continue" in output
    assert "Traceback" not in output
    assert contents(run_dir) == before

    code, output = start_again(run_dir, "run.seed=1", "run.on_change=continue")
    assert code == 0, output
    assert events(run_dir, "resume")[-1]["step"] == 25
    assert [row["step"] for row in events(run_dir, "step")[STEPS:]] == list(range(26, STEPS + 1))


def figures(run_dir: Path) -> dict[int, set[tuple[Any, ...]]]:
    """All figures that were ever recorded for each step."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    for row in events(run_dir, "step"):
        figure = (row["loss"], row["grad_norm"], row["lr"], *row["positions"])
        found.setdefault(row["step"], set()).add(figure)
    return found


def test_every_resume_continues_and_not_only_the_first(trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "elastictrain.run", *ARGUMENTS, f"run.dir={run_dir}", "task.pause_s=0.02"]
    for number, sent in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)):
        goal = last_step(run_dir) + 6
        with started(command, log=tmp_path / f"{number}.txt") as run:
            wait_until(lambda goal=goal: last_step(run_dir) >= goal, what=f"step {goal}")
            run.process.send_signal(sent)
            assert run.wait(60) == (75 if sent is signal.SIGTERM else -signal.SIGKILL)
    code, output = alone(command[3:], folder=tmp_path)
    assert code == 0, output
    assert figures(run_dir) == figures(trained)
    resumed = [row["step"] for row in events(run_dir, "resume")]
    stopped = [row["step"] for row in events(run_dir, "stop")]
    assert resumed[0] == 0
    assert resumed[1] % 5 == 0
    assert resumed[1] > 0
    assert resumed[2:] == stopped[:2]
    assert len(set(resumed)) == 4


def test_a_link_in_the_place_of_a_checkpoint_is_neither_written_nor_deleted(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.safetensors").write_text("mine")
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    link = run_dir / "checkpoints/step-000000005"
    link.symlink_to("../../precious")
    code, output = start_again(run_dir, "train.steps=10", "checkpoint.keep_last=1", "checkpoint.buffers=0")
    assert code == 0, output
    assert [path.name for path in precious.iterdir()] == ["notes.safetensors"]
    assert link.is_symlink()
    assert [found.name for found in run_dir.glob("checkpoints/step-*") if found != link] == ["step-000000010"]
    saved = events(run_dir, "checkpoint_saved")
    assert [event["checkpoint"] for event in saved] == ["step-000000005-2", "step-000000010"]


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/committed.json"])
def test_a_start_waits_for_no_fifo(name: str, run_dir: Path) -> None:
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    code, output = start_again(run_dir)
    assert code == (74 if name == "config.yaml" else 0), output


KEY_ENV = "ELASTICTRAIN_TEST_KEY"


@pytest.mark.parametrize("buffers", [0, 2], ids=["written by the worker", "written by the saver"])
def test_with_a_key_a_run_goes_on_from_what_it_signed(tmp_path: Path, buffers: int) -> None:
    run_dir, secret = tmp_path / "run", {KEY_ENV: "s" * 32}
    options = (f"checkpoint.key_env={KEY_ENV}", f"checkpoint.buffers={buffers}", "train.steps=10")
    keyed = (*ARGUMENTS, f"run.dir={run_dir}", *options)
    code, output = alone(keyed, folder=tmp_path)
    assert (code, KEY_ENV in output) == (78, True), output
    code, output = alone(keyed, folder=tmp_path, extra_environment=secret)
    assert code == 0, output
    newest, before = sorted((run_dir / "checkpoints").glob("step-*"))[:-3:-1]
    manifest = json.loads((newest / "manifest.json").read_bytes())
    assert len(manifest.pop("signature")) == 64
    # Whoever can only write to the folder cannot sign.
    del manifest["digest"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    manifest["digest"] = digest_of(text)
    (newest / "manifest.json").write_bytes(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    code, output = alone(keyed, folder=tmp_path, extra_environment=secret)
    assert code == 0, output
    resumed = [row["checkpoint"] for row in events(run_dir, "resume") if row["step"]]
    assert resumed == [before.name]
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    assert not any(secret[KEY_ENV].encode() in file.read_bytes() for file in written)
