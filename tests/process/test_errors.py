"""What a person meets who starts a run that cannot work: one message that says what to do, the right exit code, and nothing
left behind. Mistakes that configuration alone shows are in tests/integration/test_run.py."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refusals import START, RefusingHost, files_in, running_host
from torchruns import environment, torchrun, wait_until


@pytest.fixture(scope="module")
def host() -> Iterator[RefusingHost]:
    with running_host() as started:
        yield started


def test_missing_data(host: RefusingHost, tmp_path: Path) -> None:
    refusal = host.start("data=tokens", "data.path=/nowhere/tokens", folder=tmp_path)
    refusal.check(78, "/nowhere/tokens must be a folder of token files", "python -m elastictrain.data prepare")
    assert files_in(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{garbled", "must be a JSON file, but is damaged"),
        ("{}", "must be an index of token files, but is something else; was `data.path` meant to be this folder?"),
    ],
)
def test_garbled_index(index: str, says: str, host: RefusingHost, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "index.json").write_text(index)
    host.start(f"data.path={tmp_path}/tokens", folder=tmp_path).check(78, f"{tmp_path}/tokens/index.json", says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has GPUs")
def test_a_recipe_for_gpus_without_one(host: RefusingHost, tmp_path: Path) -> None:
    """Also where the launcher is asked: it knows without torch, and before anything is started."""
    host.start("recipe=llama_fsdp", folder=tmp_path).check(69, "parallel.backend=nccl needs a GPU", "parallel.backend=gloo")
    assert not (tmp_path / "run").exists()
    command = [sys.executable, "-m", "elastictrain.launch", "recipe=llama_fsdp", f"run.dir={tmp_path}/run", "preflight=off"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "parallel.backend=nccl" in done.stderr) == (69, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (("model.dim=10000000",), 78, "the state of 1 rank takes "),
        (("recipe=llama_fsdp", "parallel.backend=gloo", "model.dim=204800", "model.num_layers=2"), 69, "but this host has"),
        (("model.vocab_size=1000000000000000000",), 78, "`model` must describe a model that can be built"),
    ],
)
def test_a_state_that_cannot_fit(overrides: tuple[str, ...], code: int, says: str, host: RefusingHost, tmp_path: Path) -> None:
    host.start(*overrides, folder=tmp_path).check(code, says)


def test_sequence_longer_than_the_model(host: RefusingHost, tmp_path: Path) -> None:
    refusal = host.start("train.seq_len=300", "model.max_seq_len=256", folder=tmp_path)
    refusal.check(78, "`train.seq_len` must be <= model.max_seq_len = 256, but is 300")
    assert files_in(tmp_path / "run") == []


IN_THE_WAY = "in the way"


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/run"])
def test_run_dir_that_cannot_be(place: str, host: RefusingHost, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(IN_THE_WAY)
    refusal = host.start(f"run.dir={tmp_path / place}", folder=tmp_path)
    refusal.check(74, "`run.dir`", str(tmp_path / place))
    assert (tmp_path / "file").read_text() == IN_THE_WAY


def test_run_dir_without_permission(host: RefusingHost, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    refusal = host.start(f"run.dir={tmp_path}/locked/run", folder=tmp_path)
    refusal.check(74, "`run.dir` cannot be used", "Permission denied", "Set run.dir to another place")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        (folder / "filler").write_bytes(bytes(64 << 10))
        yield folder
    finally:
        # What a run leaves behind for a moment, its saver or its watcher, may have a file open there.
        wait_until(lambda: subprocess.run(["umount", str(folder)], check=False).returncode == 0, timeout_s=30, what="umount")


def test_full_disk(full_disk: Path, host: RefusingHost, tmp_path: Path) -> None:
    refusal = host.start(f"run.dir={full_disk}/run", folder=tmp_path)
    refusal.check(74, "`run.dir` cannot be used", "No space left on device", "free space or raise the quota")
    assert files_in(full_disk) == [f"{full_disk}/filler"]


def test_disk_that_fills_up_during_the_run(full_disk: Path, host: RefusingHost, tmp_path: Path) -> None:
    os.truncate(full_disk / "filler", 32 << 10)
    memory = f"checkpoint.memory_dir={tmp_path}/host-memory"
    refusal = host.start(f"run.dir={full_disk}/run", "checkpoint.every_steps=1", memory, folder=tmp_path)
    refusal.check(74, "checkpoint failed (1 in a row)", "3 checkpoints in a row could not be saved", "free space")
    assert not [name for name in files_in(full_disk) if "safetensors" in name]


@pytest.mark.parametrize(
    ("package", "url"), [("s3fs", "s3://bucket/run"), ("gcsfs", "gs://bucket/run"), ("adlfs", "az://bucket/run")]
)
def test_missing_package(package: str, url: str, host: RefusingHost, tmp_path: Path) -> None:
    (tmp_path / "blocked" / package).mkdir(parents=True)
    (tmp_path / "blocked" / package / "__init__.py").write_text(f"raise ImportError('no {package} here')\n")
    refusal = host.start(f"run.dir={url}", folder=tmp_path, path=[tmp_path / "blocked"])
    refusal.check(78, url, f"pip install {package}")


LATE_RANK_0 = """
import os, time
time.sleep(2.0 if os.environ["RANK"] == "0" else 0.0)
from elastictrain.entry_point import leave_process
from elastictrain.run import main
leave_process(main())
"""


@pytest.mark.parametrize("wrong", ["data.path=/nowhere/tokens", "train.stepz=3"])
def test_one_message_per_host_under_torchrun(wrong: str, tmp_path: Path) -> None:
    # torchrun ends all workers when one has left, also when that one came first and is not the one that speaks.
    (tmp_path / "late.py").write_text(LATE_RANK_0)
    began = time.monotonic()
    with torchrun(
        [*START, f"run.dir={tmp_path}/run", wrong], world_size=2, folder=tmp_path, module=[f"{tmp_path}/late.py"]
    ) as run:
        assert run.wait(60) == 1
        output = run.output()
    assert output.count("elastictrain: ") == 1, output
    assert time.monotonic() - began < 30
    assert files_in(tmp_path / "run") == []
