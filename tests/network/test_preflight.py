"""Preflights of three hosts with one thing wrong at a time, some of them under torchrun.

With EVERYTHING_UNDER_TORCHRUN=1 in the environment all of them are; starting torch on three hosts is what a test takes then.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import start_run
from torchruns import REPOSITORY, TINY, events, losses

from elastictrain.chaos.fleet import LauncherFleet
from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork
from elastictrain.chaos.network.links import block, delay, inside, jumbo, limit_rate
from elastictrain.errors import EXIT_CONFIG, EXIT_TRANSPORT, EXIT_UNFIT

PORT = 29610
UNDER_TORCHRUN = bool(os.environ.get("EVERYTHING_UNDER_TORCHRUN"))
_MEMBER = Path(__file__).with_name("host_preflight_member.py")
STARTING_S = 120.0
# The tests' hosts name an interface for gloo by themselves, as a person would.
UNSET = {"GLOO_SOCKET_IFNAME": ""}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the first host printed, and how each torchrun ended."""

    verdicts: list[dict[str, Any]]
    codes: dict[str, int]
    output: dict[str, str]

    def failed(self) -> set[tuple[str, str]]:
        return {(row["check"], row["subject"]) for row in self.verdicts if row["status"] == "fail"}

    def remedy(self, check: str) -> str:
        return next(row["remedy"] for row in self.verdicts if row["check"] == check and row["status"] == "fail")


def preflight(
    hosts: Sequence[VirtualHost],
    folder: Path,
    *,
    run_dir: Path,
    level: str = "full",
    environments: Mapping[str, Mapping[str, str]] = {},
    torchrun: bool = UNDER_TORCHRUN,
) -> Outcome:
    """Of all hosts; `environments` by name of host."""
    store_port = str(hosts[0].port())
    names = ",".join(host.name for host in hosts)
    exchange = folder / "exchange"
    exchange.mkdir(parents=True)
    runs = {}
    for rank, host in enumerate(hosts):
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(rank)]
            command += ["--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", store_port]
            command += ["-m", "elastictrain.preflight", "--level", level, "--json", "--port", str(PORT)]
            command += ["--run-dir", str(run_dir)]
        else:
            command = [sys.executable, str(_MEMBER), host.name, str(rank), names, hosts[0].address, level, str(run_dir)]
            command += [str(PORT), str(exchange)]
        extra = {**UNSET, "PYTHONPATH": str(REPOSITORY), **environments.get(host.name, {})}
        runs[host.name] = host.popen(command, log=folder / f"{host.name}.txt", extra_environment=extra)
    codes = {name: run.wait(STARTING_S) for name, run in runs.items()}
    output = {name: run.output() for name, run in runs.items()}
    rows = [line for line in output[hosts[0].name].splitlines() if line.startswith("[{")]
    assert rows, output
    return Outcome(json.loads(rows[0]), codes, output)


@pytest.fixture
def three(network: VirtualNetwork) -> list[VirtualHost]:
    return [network.add(name) for name in ("a", "b", "c")]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_nothing_is_wrong(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    for level, torchrun in (("full", True), ("quick", False), ("full", False)):
        outcome = preflight(three, tmp_path / f"{level}-{torchrun}", run_dir=run_dir, level=level, torchrun=torchrun)
        assert outcome.failed() == set(), outcome.verdicts
        assert set(outcome.codes.values()) == {0}, outcome.output
        assert {"roster", "reachable", "mtu", "latency", "clock", "interface", "storage", "alike"} <= {
            row["check"] for row in outcome.verdicts
        }
    assert not list(run_dir.iterdir()), "nothing is left behind"


DONE_ELSEWHERE = pytest.mark.skipif(not UNDER_TORCHRUN, reason="test_links.py does the same without torch")


def black_hole(hosts: list[VirtualHost]) -> None:
    for host in hosts:
        jumbo(host, switch_too=False)


def slow(hosts: list[VirtualHost]) -> None:
    limit_rate(hosts[1])


def slow_to_send(hosts: list[VirtualHost]) -> None:
    limit_rate(hosts[2], received=False)


def blocked(hosts: list[VirtualHost]) -> None:
    block(hosts[1], hosts[2], port=PORT)


@pytest.mark.parametrize(
    ("fault", "check", "subjects", "remedy"),
    [
        (black_hole, "mtu", None, "ip link set"),
        pytest.param(slow, "bandwidth", {"b"}, "", marks=DONE_ELSEWHERE),
        pytest.param(slow_to_send, "bandwidth", {"c"}, "", marks=DONE_ELSEWHERE),
        pytest.param(blocked, "reachable", {"b -> c"}, str(PORT), marks=DONE_ELSEWHERE),
    ],
)
def test_a_network_that_is_ill(
    fault: Callable[[list[VirtualHost]], None],
    check: str,
    subjects: set[str] | None,
    remedy: str,
    three: list[VirtualHost],
    run_dir: Path,
    tmp_path: Path,
) -> None:
    fault(three)
    # Large frames that vanish must not keep the hosts from telling each other of it.
    outcome = preflight(three, tmp_path, run_dir=run_dir, torchrun=UNDER_TORCHRUN or fault is black_hole)
    assert {name for name, _ in outcome.failed()} == {check}, outcome.verdicts
    assert subjects is None or {subject for _, subject in outcome.failed()} == subjects
    assert remedy in outcome.remedy(check)
    assert all(outcome.codes.values())


@DONE_ELSEWHERE
def test_one_host_is_far_away(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    delay(three[1], [three[0], three[2]], seconds=0.02, log=tmp_path / "relay.txt")
    outcome = preflight(three, tmp_path, run_dir=run_dir)
    assert ("latency", "b") in outcome.failed(), outcome.verdicts
    assert {subject for _, subject in outcome.failed()} == {"b"}


@pytest.mark.parametrize(("pinned", "name"), [("docker0", "docker0"), ("ens7", "ens7")])
def test_an_interface_that_a_person_chose_wrongly(
    pinned: str, name: str, three: list[VirtualHost], run_dir: Path, tmp_path: Path
) -> None:
    inside(three[1].namespaces, "ip", "link", "add", "docker0", "type", "bridge")
    inside(three[1].namespaces, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
    inside(three[1].namespaces, "ip", "link", "set", "docker0", "up")
    environments = {"b": {"GLOO_SOCKET_IFNAME": pinned, "NCCL_SOCKET_IFNAME": pinned}}
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", environments=environments)
    assert outcome.failed() == {("interface", "b")}, outcome.verdicts
    assert "eth0" in outcome.remedy("interface")
    assert name in str([row for row in outcome.verdicts if row["check"] == "interface"])


def test_a_route_through_docker0_and_nothing_that_follows_from_it(
    three: list[VirtualHost], run_dir: Path, tmp_path: Path
) -> None:
    inside(three[1].namespaces, "ip", "link", "add", "docker0", "type", "bridge")
    inside(three[1].namespaces, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
    inside(three[1].namespaces, "ip", "link", "set", "docker0", "up")
    for other in (three[0], three[2]):
        inside(three[1].namespaces, "ip", "route", "add", f"{other.address}/32", "dev", "docker0")
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", torchrun=False)
    assert outcome.failed() == {("interface", "b")}, outcome.verdicts
    assert "docker0" in outcome.remedy("interface")
    assert outcome.codes == {"a": EXIT_TRANSPORT, "b": EXIT_UNFIT, "c": EXIT_TRANSPORT}


def test_an_address_that_two_hosts_have(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    three[2].move(three[1].address)
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", torchrun=False)
    assert outcome.failed() == {("interface", "b"), ("interface", "c")}, outcome.verdicts
    assert outcome.codes == {"a": EXIT_TRANSPORT, "b": EXIT_UNFIT, "c": EXIT_UNFIT}


def test_an_own_name_that_is_loopback(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 c\n")
    inside(three[2].namespaces, "mount", "--bind", str(hosts_file), "/etc/hosts")
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick")
    assert outcome.failed() == {("name", "c")}, outcome.verdicts
    assert "/etc/hosts" in outcome.remedy("name")
    # torchrun tells its own code only; why is said by each host.
    assert UNDER_TORCHRUN or outcome.codes == {"a": EXIT_TRANSPORT, "b": EXIT_TRANSPORT, "c": EXIT_UNFIT}
    assert {name for name in "abc" if "unfit" in outcome.output[name]} == {"c"}


def test_a_clock_that_is_off(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 20\n")
    environments = {"b": {"PYTHONPATH": f"{hooks}:{REPOSITORY}"}}
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", environments=environments)
    assert outcome.failed() == {("clock", "b")}, outcome.verdicts


def full_disk(host: VirtualHost, run_dir: Path) -> None:
    inside(host.namespaces, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(run_dir))
    inside(host.namespaces, "sh", "-c", f"head -c 100000 /dev/zero > {run_dir}/fill || true")


def read_only_disk(host: VirtualHost, run_dir: Path) -> None:
    inside(host.namespaces, "mount", "--bind", str(run_dir), str(run_dir))
    inside(host.namespaces, "mount", "-o", "remount,bind,ro", str(run_dir))


@pytest.mark.parametrize(("fault", "words"), [(full_disk, "df"), (read_only_disk, "remount")])
def test_a_folder_that_cannot_be_written(
    fault: Callable[[VirtualHost, Path], None], words: str, three: list[VirtualHost], run_dir: Path, tmp_path: Path
) -> None:
    fault(three[1], run_dir)
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick")
    assert {subject for _, subject in outcome.failed()} == {"b"}, outcome.verdicts
    assert ("storage", "b") in outcome.failed()
    assert words in outcome.remedy("storage")


def own_disk(host: VirtualHost, run_dir: Path) -> None:
    inside(host.namespaces, "mount", "-t", "tmpfs", "tmpfs", str(run_dir))


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_run_folder_that_one_host_does_not_share(level: str, three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    own_disk(three[2], run_dir)
    outcome = preflight(three, tmp_path, run_dir=run_dir, level=level)
    assert outcome.failed() == {("storage", "c")}, outcome.verdicts
    assert UNDER_TORCHRUN or outcome.codes == {"a": EXIT_TRANSPORT, "b": EXIT_TRANSPORT, "c": EXIT_UNFIT}
    assert not list(run_dir.iterdir()), "nothing is left behind"


def test_a_run_folder_that_no_host_shares(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    for host in three[1:]:
        own_disk(host, run_dir)
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick")
    assert outcome.failed() == {("storage", "b"), ("storage", "c")}, outcome.verdicts
    # Perhaps the first host is the only one with another folder: nobody is unfit.
    assert set(outcome.codes.values()) == {1 if UNDER_TORCHRUN else EXIT_TRANSPORT}


def test_a_host_with_other_code(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(REPOSITORY / "elastictrain", other / "elastictrain", ignore=shutil.ignore_patterns("__pycache__"))
    file = other / "elastictrain/train/step.py"
    file.write_text(f"{file.read_text()}\n# changed\n")
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", environments={"c": {"PYTHONPATH": str(other)}})
    assert outcome.failed() == {("alike", "c")}, outcome.verdicts
    assert "elastictrain/train" in str(outcome.verdicts)


def test_a_host_with_other_settings(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    environments = {name: {"NCCL_ALGO": "Tree" if name == "b" else "Ring"} for name in "abc"}
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick", environments=environments)
    assert outcome.failed() == {("alike", "b")}, outcome.verdicts
    assert "NCCL_ALGO" in outcome.remedy("alike")


def test_what_fails_everywhere_is_not_tried_again(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    for host in three:
        read_only_disk(host, run_dir)
    outcome = preflight(three, tmp_path, run_dir=run_dir, level="quick")
    # torchrun tells no code but its own.
    assert set(outcome.codes.values()) == {1 if UNDER_TORCHRUN else EXIT_CONFIG}, outcome.output
    assert all("storage" in output for output in outcome.output.values())


def test_a_run_plans_its_interfaces_and_leaves_out_nobody(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "preflight=default", "train.steps=3", "train.eval_every_steps=0"]
    start_run(three, arguments, run_dir=run_dir, logs=tmp_path / "logs", extra_environment=UNSET).train()
    assert sorted(losses(run_dir)) == [1, 2, 3]
    (hosts_stage, *_) = events(run_dir, "preflight")
    assert (hosts_stage["stage"], hosts_stage["level"], hosts_stage["reason"]) == ("hosts", "full", "first start")
    assert hosts_stage["counts"]["fail"] == 0
    planned = events(run_dir, "transport")
    assert {row["host"]: row["variables"]["GLOO_SOCKET_IFNAME"] for row in planned} == dict.fromkeys("abc", "eth0")


def test_a_run_trains_on_a_slow_host_that_cannot_be_left_out(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    limit_rate(three[1])
    arguments = [*TINY, "preflight=full", "train.steps=2", "train.eval_every_steps=0"]
    start_run(three, arguments, run_dir=run_dir, logs=tmp_path / "logs", extra_environment=UNSET).train()
    assert sorted(losses(run_dir)) == [1, 2]
    (hosts_stage, *_) = events(run_dir, "preflight")
    assert {(row["check"], row["subject"]) for row in hosts_stage["findings"] if row["excused"]} == {("bandwidth", "b")}


@pytest.mark.parametrize(("least", "members"), [(2, ["a", "c"]), (3, ["a", "b", "c"])])
def test_a_launcher_leaves_a_slow_host_out_if_enough_others_remain(
    least: int, members: list[str], three: list[VirtualHost], run_dir: Path, tmp_path: Path
) -> None:
    limit_rate(three[1])
    arguments = [*TINY, "preflight=full", "train.steps=4", "train.eval_every_steps=0", "launch.notices=false"]
    arguments += [f"launch.min_hosts={least}", "launch.max_hosts=3", "launch.join_s=120"]
    fleet = LauncherFleet(run_dir, tmp_path / "logs", arguments)
    fleet.start(*three, environment=UNSET)
    fleet.wait_for_step(4)
    fleet.wait_for_members(members)
    codes = fleet.wait()
    assert (codes["a"], codes["c"]) == (0, 0), fleet.output()
    excused = {
        (row["check"], row["subject"]) for one in events(run_dir, "preflight") for row in one["findings"] if row["excused"]
    }
    assert excused == (set() if "b" not in members else {("bandwidth", "b")})


def test_a_run_does_not_begin_on_an_unfit_host(three: list[VirtualHost], run_dir: Path, tmp_path: Path) -> None:
    read_only_disk(three[1], run_dir)
    began = time.monotonic()
    arguments = [*TINY, "preflight=quick", "train.steps=3"]
    job = start_run(three, arguments, run_dir=run_dir, logs=tmp_path / "logs", extra_environment=UNSET)
    assert all(job.wait().values())
    assert time.monotonic() - began < 60
    assert not losses(run_dir)
    (stage,) = events(run_dir, "preflight")
    assert {(row["check"], row["subject"]) for row in stage["findings"] if row["status"] == "fail"} == {("storage", "b")}
    codes = {row["rank"]: row["exit_code"] for row in events(run_dir, "failure")}
    assert (codes[0], codes[2]) == (71, 71)
    # It cannot write events: of its end torchrun tells.
    assert "storage" in job.runs["b"].output()
    assert f"exitcode  : {EXIT_UNFIT} " in job.runs["b"].output()
