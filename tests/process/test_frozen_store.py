"""The host of the store that ranks meet through is frozen, or one does not come: all end in time and name it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchruns import REPOSITORY, TINY, environment

from elastictrain.bounded_json import JsonLines
from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.fault.launcher_channel import Detached, FromWorker
from elastictrain.fault.reasons import Reason
from elastictrain.identity import CHANNEL, FOLDER, GENERATION, LAUNCHER

LIMIT_S = 5.0
STARTS_WITHIN_S = 60.0
_SERVER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
while not store.check(["elastictrain/hello/1"]):
    time.sleep(0.01)
print("met", flush=True)
time.sleep(1000)
"""


@contextmanager
def store_server() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process with the store, and the port."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, int(server.stdout.readline())
        finally:
            server.kill()


@pytest.mark.parametrize("when", ["before it is reached", "in the middle of the agreement"])
def test_a_rank_whose_store_is_frozen_ends_in_time_and_names_it(when: str, tmp_path: Path) -> None:
    with store_server() as (server, port):
        assert server.stdout is not None
        if when.startswith("before"):
            os.kill(server.pid, signal.SIGSTOP)
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "elastictrain.run", *TINY, f"run.dir={tmp_path}/run"]
        command += [f"fault.rendezvous_timeout_s={LIMIT_S}", f"checkpoint.memory_dir={tmp_path}"]
        rank = subprocess.Popen(command, cwd=tmp_path, env=environment(variables), stderr=subprocess.PIPE, text=True)
        if when.startswith("in"):
            assert server.stdout.readline() == "met\n"
            os.kill(server.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        _, said = rank.communicate(timeout=STARTS_WITHIN_S + LIMIT_S)
        seconds = time.monotonic() - began_s
    assert rank.returncode == 71, said
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said
    assert "File " not in said
    if when.startswith("in"):
        assert seconds < 3 * LIMIT_S


Worker = tuple["subprocess.Popen[bytes]", socket.socket]


def begin(rank: int, port: int, folder: Path, *, world_size: int, limit_s: float = LIMIT_S) -> Worker:
    """A worker of a launcher, and the launcher's end of its channel; it is not waited for."""
    folder.mkdir()
    ours, theirs = socket.socketpair()
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {LAUNCHER: str(os.getpid()), GENERATION: "1", FOLDER: str(folder), "PYTHONPATH": str(REPOSITORY)}
    variables[CHANNEL] = str(theirs.fileno())
    command = [sys.executable, "-m", "elastictrain.run", *TINY, f"run.dir={folder}/run"]
    command += [f"fault.rendezvous_timeout_s={limit_s}", f"checkpoint.memory_dir={folder}"]
    with theirs:
        passed = (theirs.fileno(),)
        process = subprocess.Popen(command, cwd=folder, env=environment(variables), stderr=subprocess.PIPE, pass_fds=passed)
    return process, ours


def check_end(worker: Worker, *, missing: int) -> None:
    process, channel = worker
    lines: JsonLines[FromWorker] = JsonLines(FromWorker)  # type: ignore[arg-type]
    told: list[FromWorker] = []
    with channel:
        channel.settimeout(STARTS_WITHIN_S + 3 * LIMIT_S)
        try:
            # Then it waits for a rank.
            while not any(isinstance(one, Detached) for one in told) and (data := channel.recv(1 << 16)):
                told += lines.feed(data)
            channel.close()
            _, err = process.communicate(timeout=STARTS_WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == EXIT_TRANSPORT, err.decode()
    (reason,) = (one for one in told if isinstance(one, Reason))
    assert (reason.exit_code, reason.missing) == (EXIT_TRANSPORT, (missing,))


def test_a_worker_whose_store_is_frozen_tells_its_launcher_whose_it_is(tmp_path: Path) -> None:
    with store_server() as (server, port):
        os.kill(server.pid, signal.SIGSTOP)
        check_end(begin(1, port, tmp_path / "b", world_size=2), missing=0)


def test_workers_that_wait_for_one_that_does_not_come_tell_their_launchers_which(tmp_path: Path) -> None:
    with store_server() as (_, port):
        workers = [begin(rank, port, tmp_path / str(rank), world_size=3, limit_s=2 * LIMIT_S) for rank in (0, 1)]
        for worker in workers:
            check_end(worker, missing=2)
