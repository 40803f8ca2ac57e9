"""The hosts of the network tests are what they seem, leave nothing behind, and carry training runs that lose one of them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import durable_step, start_run
from torchruns import TINY, Run, environment, events, last_step, last_wins, losses, train_warm, wait_until

from elastictrain.chaos.network.hosts import INTERFACE, VirtualHost, VirtualNetwork
from elastictrain.chaos.network.namespaces import processes_in
from elastictrain.config.load import load
from elastictrain.data.ledger import check_exactly_once, fold, read_ledger
from elastictrain.data.opening import open_datasets
from elastictrain.storage.opening import open_store

STEPS = 20
BATCH = 8
ARGUMENTS = (
    *TINY,
    "task._target_=tests.process.paced.PacedLlama",
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=5",
    "data.ledger=true",
    "fault.heartbeat_s=0.2",
)
STEP_TIMEOUT_S = 3.0

ECHO = """
import socket
with socket.create_server(("", 7000)) as server:
    peer = server.accept()[0]
    while data := peer.recv(1):
        peer.sendall(data)
"""

ASK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=5)
peer.settimeout(0.2)
word = ""
while word in ("", "heard", "silence"):
    try:
        peer.sendall(b"x")
        word = "heard" if peer.recv(1) else "closed"
    except TimeoutError:
        word = "silence"
    except ConnectionError:
        word = "closed"
    print(word, flush=True)
    time.sleep(0.02)
"""

DESCRIBE = """
import os, socket
name = socket.gethostname()
print(name, socket.getfqdn(), socket.gethostbyname(name), *sorted(os.listdir("/sys/class/net")))
"""

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print("settled", flush=True)
time.sleep(600)
"""

OWNER = """
import sys, time
from pathlib import Path
from elastictrain.chaos.network.hosts import VirtualNetwork
with VirtualNetwork(Path(sys.argv[1])) as network:
    host = network.add("a")
    print(host.network, host.memory, flush=True)
    time.sleep(600)
"""


def python(host: VirtualHost, code: str, *arguments: str, log: Path) -> Run:
    """Start a small program on a host."""
    return host.popen([sys.executable, "-c", code, *arguments], log=log)


def last_word(run: Run) -> str:
    return run.output().rpartition("\n")[0].rpartition("\n")[2]


def wait_for_word(run: Run, word: str) -> None:
    wait_until(lambda: last_word(run) == word, timeout_s=60, what=f"{word!r}")


def test_each_host_is_itself(network: VirtualNetwork, tmp_path: Path) -> None:
    for host in (network.add("a"), network.add("b")):
        described = python(host, DESCRIBE, log=tmp_path / f"{host.name}.txt")
        assert described.wait(60) == 0, described.output()
        assert described.output().split() == [host.name, host.name, host.address, INTERFACE, "lo"]
        assert host.memory.stat().st_mode & 0o777 == 0o700
        assert host.memory.parent == Path("/dev/shm")


def test_a_cut_link_is_silent_and_a_killed_host_is_not(network: VirtualNetwork, tmp_path: Path) -> None:
    a, b = network.add("a"), network.add("b")
    python(b, ECHO, log=tmp_path / "b.txt")
    wait_until(lambda: listening(b), timeout_s=60, what="the echo")
    asking = python(a, ASK, "b", log=tmp_path / "a.txt")
    wait_for_word(asking, "heard")
    b.cut()
    wait_for_word(asking, "silence")
    b.restore()
    wait_for_word(asking, "heard")
    b.kill()
    assert asking.wait(60) == 0
    assert last_word(asking) == "closed"


def listening(host: VirtualHost) -> bool:
    """Whether somebody on the host accepts connections."""
    return any(" 0A " in Path(f"/proc/{pid}/net/tcp").read_text() for pid in processes_in(host.network)[:1])


def test_a_lost_host_says_nothing(network: VirtualNetwork, tmp_path: Path) -> None:
    a, b = network.add("a"), network.add("b")
    python(b, ECHO, log=tmp_path / "b.txt")
    (b.memory / "snapshots").mkdir()
    wait_until(lambda: listening(b), timeout_s=60, what="the echo")
    asking = python(a, ASK, "b", log=tmp_path / "a.txt")
    wait_for_word(asking, "heard")
    b.lose()
    wait_for_word(asking, "silence")
    assert asking.process.poll() is None
    assert "closed" not in asking.output()
    assert list(b.memory.iterdir()) == []


def test_nothing_is_left_behind_by_a_test_that_fails(tmp_path: Path) -> None:
    hosts = []

    def fail() -> None:
        with VirtualNetwork(tmp_path / "network") as network:
            hosts.append(network.add("a"))
            run = python(hosts[0], STUBBORN, log=tmp_path / "a.txt")
            wait_until(lambda: run.output().count("settled") == 2, timeout_s=60, what="two processes")
            (hosts[0].memory / "snapshot").write_bytes(b"x")
            assert len(processes_in(hosts[0].network)) == 3
            raise ZeroDivisionError

    before = socket.if_nameindex()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert processes_in(hosts[0].network) == []
    assert not hosts[0].memory.exists()
    assert socket.if_nameindex() == before


def test_nothing_is_left_behind_by_tests_that_are_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path / "network"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": os.pathsep.join(sys.path)}),
    )
    with owner:
        assert owner.stdout is not None
        network, memory = owner.stdout.readline().split()
        assert processes_in(int(network))
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes_in(int(network)) and not Path(memory).exists(), timeout_s=60, what="an empty place")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of two workers on this machine as it is, by kind of parallelism."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        parallel: train_warm([*ARGUMENTS, f"parallel={parallel}"], world_size=2, folder=folder / parallel)
        for parallel in ("ddp", "fsdp")
    }


def test_two_hosts_train_as_one_does(network: VirtualNetwork, tmp_path: Path, undisturbed: dict[str, Path]) -> None:
    a, b = network.add("a"), network.add("b")
    run_dir = tmp_path / "run"
    start_run([a, b], [*ARGUMENTS, "parallel=ddp"], run_dir=run_dir, logs=tmp_path).train()
    assert [row["hosts"] for row in events(run_dir, "start")] == [["a", "b"]]
    assert f"memory_dir: {a.memory}\n" in (run_dir / "config.yaml").read_text()
    assert losses(run_dir) == losses(undisturbed["ddp"])
    assert_every_position_once(run_dir, undisturbed["ddp"])


def test_a_new_host_takes_the_place_of_a_lost_one(
    network: VirtualNetwork, tmp_path: Path, undisturbed: dict[str, Path]
) -> None:
    """Sharded, so that neither host has all of the state."""
    a, b = network.add("a"), network.add("b")
    run_dir, arguments = tmp_path / "run", [*ARGUMENTS, "parallel=fsdp"]
    paced = [*arguments, "task.pause_s=0.05", f"fault.step_timeout_s={STEP_TIMEOUT_S}"]
    before = start_run([a, b], paced, run_dir=run_dir, logs=tmp_path / "before")
    wait_until(lambda: durable_step(run_dir) >= 10, timeout_s=30, what="step 10 in storage")
    b.lose()
    durable = durable_step(run_dir)
    # Nobody tells the survivor. It goes by the limit of a step, and says who was heard last.
    assert before.runs["a"].wait(30) == 1
    failure = events(run_dir, "failure")[-1]
    assert (failure["rank"], failure["exit_code"]) == (0, 71)
    assert list(failure["last_heard"]) == ["rank 1 on b"]
    assert last_step(run_dir) < STEPS

    c = network.add("c")
    start_run([a, c], arguments, run_dir=run_dir, logs=tmp_path / "after", rendezvous="c10d").train()
    assert [row["hosts"] for row in events(run_dir, "start")] == [["a", "b"], ["a", "c"]]
    assert events(run_dir, "resume")[-1]["step"] >= durable >= 10
    # Whatever was done a second time came out as the first time, bit for bit.
    assert losses(run_dir) == losses(undisturbed["fsdp"])
    assert_every_position_once(run_dir, undisturbed["fsdp"])


def assert_every_position_once(run_dir: Path, undisturbed: Path) -> None:
    config = load(last_wins([*ARGUMENTS, "run.dir=unused"]))
    num_samples = len(open_datasets(config.data, seq_len=config.train.seq_len).train)
    rows = list(read_ledger(open_store(str(run_dir))))
    problems = check_exactly_once(
        rows, steps=STEPS, global_batch=BATCH, num_samples=num_samples, seed=config.run.seed, shuffle=config.data.shuffle
    )
    assert problems == ()
    assert fold(rows) == fold(list(read_ledger(open_store(str(undisturbed)))))
