"""`python -m elastictrain.preflight` as a person types it, on one host."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from elastictrain.preflight.verdict import Verdict


def preflight(*arguments: str, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastictrain.preflight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | dict(environment))


def test_a_host_alone_is_told_something_useful_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    done = preflight("--run-dir", str(tmp_path / "run"))
    # Three seconds are promised; this machine may be busy.
    assert time.monotonic() - began < 15
    assert (done.returncode, done.stderr) == (0, "")
    for check in ("storage", "disk", "memory", "name", "gpus", "interface"):
        assert re.search(rf"^(pass|skip|warn)  {check} ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"\d+ passed", done.stdout.splitlines()[-1])
    assert not (tmp_path / "run").exists()


def test_a_module_that_a_stored_run_names_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "trap_of_a_stranger.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w').close()")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("task:\n  _target_: trap_of_a_stranger.Task\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = preflight("--run-dir", str(tmp_path / "run"), environment={"PYTHONPATH": path})
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "sprung").exists()


def test_what_fails_ends_with_69_and_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = preflight("--run-dir", str(tmp_path / "file"))
    assert done.returncode == 69
    lines = done.stdout.splitlines()[1:]
    assert lines[0].startswith("fail  storage")
    assert next(line for line in lines[1:] if not line.startswith(" " * 9)).startswith("      -> ")
    assert preflight("--run-dir", str(tmp_path / "file"), "--check", "storage=warn").returncode == 0
    assert "storage" not in preflight("--run-dir", str(tmp_path / "file"), "--check", "storage=off").stdout


def test_a_pod_without_workers_is_checked_alone() -> None:
    pod = {"PET_NNODES": "2", "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = preflight("--json", "--level", "quick", environment=pod)
    assert done.returncode == 0
    assert json.loads(done.stdout)


def test_json_is_for_scripts(tmp_path: Path) -> None:
    rows = json.loads(preflight("--json", "--level", "quick").stdout)
    assert set(rows[0]) == {field.name for field in fields(Verdict)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "dsk=warn"], "'dsk' is no check; there are name, "),
        (["--check", "disk=maybe"], "the mode must be one of fail, exclude, warn, off, but is 'maybe'"),
        (["--port", "70000"], "must be a port from 1 to 65535, but is '70000'"),
        (["--level", "some"], "invalid choice"),
        (["--table"], "torchrun"),
        (["speed"], "--listen --to"),
        (["speed", "--to", "127.0.0.1", "--size", "much"], "'much'"),
        (["speed", "--to", "127.0.0.1", "--device", "x"], "must be the index of a GPU, but is 'x'"),
    ],
)
def test_a_wrong_command_line_ends_with_64(arguments: list[str], words: str) -> None:
    done = preflight(*arguments)
    assert done.returncode == 64
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def listening(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A listener, and what it says to type on the other host."""
    command = [sys.executable, "-m", "elastictrain.preflight", "speed", "--listen", "127.0.0.1", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            line = ""
            while "--to" not in line:
                line = listener.stdout.readline()
                assert line, listener.stderr
            told = line.split()
            yield listener, told[told.index("speed") :]
        finally:
            listener.kill()


def test_a_speed_test_between_two_processes() -> None:
    with listening("--size", "300M") as (listener, told):
        done = preflight(*told)
        assert (done.returncode, done.stderr) == (0, "")
        said, errors = listener.communicate(timeout=30)
        assert (listener.returncode, errors) == (0, "")
    rates = [re.findall(r"([\d.]+) Gbit/s +([\d.]+) GB/s  \(300 MiB in ", text) for text in (done.stdout, said)]
    assert [len(one) for one in rates] == [3, 3]
    assert all(float(bits) == pytest.approx(8 * float(of_bytes), rel=0.05) for one in rates for bits, of_bytes in one)
    assert all(float(bits) > 0.1 for one in rates for bits, _ in one)


def test_a_speed_test_with_another_token_or_nobody() -> None:
    with listening() as (_, told):
        wrong = preflight("speed", "--to", "127.0.0.1", "--port", told[told.index("--port") + 1], "--token", "no")
    assert (wrong.returncode, wrong.stderr.count("127.0.0.1, port ")) == (71, 1)
    nobody = preflight("speed", "--to", "127.0.0.1", "--port", told[told.index("--port") + 1])
    assert (nobody.returncode, "refused" in nobody.stderr) == (71, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = preflight("speed", "--listen", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 69


def test_tables_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "elastictrain.preflight", "--table", "--json", "--check", "matmul=warn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert {"bus_bandwidth", "p2p"} <= {row["check"] for row in json.loads(done.stdout)}
    sizes = re.findall(r"^ *(\d+ [KMG]B) +[\d.]+ +[\d.]+ +[\d.]+$", done.stderr, re.MULTILINE)
    assert sizes[:3] == ["1 KB", "4 KB", "16 KB"]
    matrix = re.findall(r"^ *from (\d) +(-|[\d.]+) +(-|[\d.]+)$", done.stderr, re.MULTILINE)
    assert [(row[0], row[1 + int(row[0])]) for row in matrix] == [("0", "-"), ("1", "-")]
