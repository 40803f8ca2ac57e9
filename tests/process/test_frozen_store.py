"""The host of the store that ranks or torchruns meet through is frozen: each ends in time, and names who did not answer."""

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
from torchruns import REPOSITORY, TINY, environment, free_port, wait_until

from elastictrain.errors import EXIT_TRANSPORT
from elastictrain.fault.reasons import read_reasons
from elastictrain.identity import FOLDER, LAUNCHER
from elastictrain.launch.orders import Orders, encode, read_answer

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


HOSTS = ("first-host", "second-host", "third-host")
_AGENT = """
import sys
from elastictrain.launch import agent
# Of interest is what comes after it.
agent.import_ahead = lambda: None
sys.exit(agent.main())
"""


def begin(index: int, port: int, folder: Path, *, hosts: int, limit_s: float = LIMIT_S) -> "subprocess.Popen[bytes]":
    """The torchrun of one host, as its launcher starts it; it is not waited for."""
    folder.mkdir()
    arguments = f"--nnodes {hosts} --node-rank {index} --nproc-per-node 1 --max-restarts 0 --rdzv-conf timeout=600".split()
    arguments += f"--master-addr 127.0.0.1 --master-port {port} -m elastictrain.run --help".split()
    variables = {LAUNCHER: str(os.getpid()), FOLDER: str(folder)}
    orders = Orders(tuple(arguments), variables, str(folder / "answer.json"), 1, HOSTS[:hosts], limit_s)
    command = [sys.executable, "-u", "-c", _AGENT]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert agent.stdin is not None
    agent.stdin.write(encode(orders))
    agent.stdin.flush()
    return agent


def check_end(agent: "subprocess.Popen[bytes]", folder: Path, *, missing: int) -> None:
    try:
        _, err = agent.communicate(timeout=STARTS_WITHIN_S + 3 * LIMIT_S)
    finally:
        agent.kill()
    assert agent.returncode == 1
    assert read_answer(folder / "answer.json").missing == (missing,)
    (reason,) = read_reasons(str(folder))
    assert reason.exit_code == EXIT_TRANSPORT
    assert HOSTS[missing] in reason.sentence
    assert err.decode() == f"elastictrain: {reason.sentence}\n"


def test_a_torchrun_whose_store_is_frozen_ends_in_time_and_names_its_host(tmp_path: Path) -> None:
    with store_server() as (server, port):
        os.kill(server.pid, signal.SIGSTOP)
        check_end(begin(1, port, tmp_path / "b", hosts=2), tmp_path / "b", missing=0)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_torchruns_that_wait_for_one_that_does_not_come_end_in_time_and_name_its_host(tmp_path: Path) -> None:
    port = free_port()
    # The first one has the store: it is to be there when the second one asks who came.
    first = begin(0, port, tmp_path / "a", hosts=3, limit_s=600.0)
    try:
        wait_until(lambda: first.poll() is not None or listens(port), timeout_s=STARTS_WITHIN_S, what="the store")
        second = begin(1, port, tmp_path / "b", hosts=3)
        alone = begin(0, free_port(), tmp_path / "c", hosts=2)
        check_end(second, tmp_path / "b", missing=2)
        check_end(alone, tmp_path / "c", missing=1)
    finally:
        first.kill()
        first.communicate()
