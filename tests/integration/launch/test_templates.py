"""Job templates: what can be checked of them without their clusters. Their commands run against stand-ins of a few lines."""

import ast
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastictrain.config.composed import FaultGroup, RunConfig
from elastictrain.config.load import load
from elastictrain.errors import EXIT_OK, EXIT_STOPPED, EXIT_STORAGE, EXIT_USAGE
from elastictrain.launch.cluster.detect import detect
from tests.integration.launch.templates import FINAL, FOLDER, after, bash, bash_array, noted, read_yaml, stand_in, with_options

SHELL_TEMPLATES = ("slurm.sbatch", "runai.sh", "vast.sh", "ssh.sh", "user-data.sh")
TEMPLATES = (*SHELL_TEMPLATES, "kubernetes.yaml")
_KUBERNETES_GRACE_S = 30


def run_arguments(name: str) -> list[str]:
    """What the template gives to the launcher."""
    text = (FOLDER / name).read_text()
    if name == "kubernetes.yaml":
        return [str(argument) for argument in container()["args"]]
    return bash_array(text)


@cache
def composed(name: str) -> RunConfig:
    return load(run_arguments(name), with_task=False)


def job() -> dict[str, Any]:
    return read_yaml("kubernetes.yaml")


def pod() -> dict[str, Any]:
    return job()["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TEMPLATES)
def test_its_command_composes(name: str) -> None:
    config = composed(name)
    assert config.run.dir == "s3://bucket/llama"
    assert config.parallel.kind == "fsdp"


@pytest.mark.parametrize("name", [*TEMPLATES, "skypilot.yaml", "submitit_job.py"])
def test_every_line_to_set_is_marked_and_documented(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert "set the" in text.replace("\n# ", " ")
    assert text.count("# <-") >= 3
    assert "docs/clusters.md" in text
    assert f"scripts/cluster/{name}" in (FOLDER.parents[1] / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize("name", SHELL_TEMPLATES)
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True, timeout=30)


def slurm_options() -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE)
    return dict(lines)


def test_slurm_signals_the_launchers_in_time() -> None:
    options = slurm_options()
    signal, lead_s = options["signal"].split("@")
    # With `B:` the script alone would be told.
    assert signal == "USR1"
    # Slurm may be 60 s early, never late.
    assert composed("slurm.sbatch").fault.notice_s + FaultGroup().shutdown_grace_s <= int(lead_s)
    assert {"requeue", "no-kill"} <= options.keys()
    assert (options["ntasks-per-node"], options["open-mode"]) == ("1", "append")


def test_slurm_gets_the_same_run_from_python() -> None:
    """tests/network/test_slurm.py submits both."""
    text = (FOLDER / "submitit_job.py").read_text()
    values = {target.id: node.value for node in ast.parse(text).body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
    assert ast.literal_eval(values["RUN"]) == run_arguments("slurm.sbatch")


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (EXIT_STOPPED, None, True),
        (EXIT_STOPPED, "500", True),
        (137, None, True),
        (137, "19", True),
        (137, "20", False),
        (EXIT_OK, None, False),
        (EXIT_STORAGE, None, False),
        *[(code, None, False) for code in sorted(FINAL)],
    ],
)
def test_slurm_requeues_what_was_stopped(tmp_path: Path, code: int, restarts: str | None, requeued: bool) -> None:
    stand_in(tmp_path / "bin", "srun", f"exit {code}")
    stand_in(tmp_path / "bin", "scontrol", "")
    environment = {"SLURM_JOB_ID": "4242", "SLURM_CPUS_PER_TASK": "64"} | (
        {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    )
    done = bash("slurm.sbatch", bin_folder=tmp_path / "bin", folder=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (code, "")
    assert noted(tmp_path, "scontrol") == ([["requeue", "4242"]] if requeued else [])
    (srun,) = noted(tmp_path, "srun")
    command = srun.index(".venv/bin/python")
    assert srun[command:] == [".venv/bin/python", "-m", "elastictrain.launch", *run_arguments("slurm.sbatch")]
    assert {"--ntasks-per-node=1", "--cpus-per-task=64", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(srun[:command])


def test_kubernetes_leaves_time_and_memory() -> None:
    spec = pod()
    assert composed("kubernetes.yaml").fault.notice_s + FaultGroup().shutdown_grace_s <= spec["terminationGracePeriodSeconds"]
    assert container()["command"] == ["python", "-m", "elastictrain.launch"]
    assert spec["shareProcessNamespace"] is True
    (mount,) = container()["volumeMounts"]
    assert mount["mountPath"] == composed("kubernetes.yaml").checkpoint.memory_dir == "/dev/shm"
    (volume,) = spec["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["emptyDir"]["medium"] == "Memory"
    # What is in /dev/shm counts as the container's memory.
    assert _gib(volume["emptyDir"]["sizeLimit"]) < _gib(container()["resources"]["limits"]["memory"])


def _gib(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))


def test_kubernetes_replaces_pods_unless_that_cannot_help() -> None:
    spec = job()["spec"]
    assert (spec["completionMode"], pod()["restartPolicy"]) == ("Indexed", "Never")
    assert spec["parallelism"] == spec["completions"]
    assert spec["podReplacementPolicy"] == "Failed"
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]}
    assert by_code == dict.fromkeys(FINAL, "FailJob") | {EXIT_STOPPED: "Ignore"}
    assert all(rule["onExitCodes"]["containerName"] == container()["name"] for rule in rules if "onExitCodes" in rule)
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]


def test_a_pod_of_it_finds_its_place() -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "3"}
    for variable in container()["env"]:
        environment[variable["name"]] = variable.get("value", "10.244.0.9")
    place = detect(environment)
    assert (place.kind, place.order, place.num_hosts, place.address) == (
        "kubernetes",
        3,
        job()["spec"]["completions"],
        "10.244.0.9",
    )


def test_what_is_commented_out_of_kubernetes_fits_in() -> None:
    template = with_options("kubernetes.yaml")["spec"]["template"]
    (launcher,) = template["spec"]["containers"]
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}
    assert launcher["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert launcher["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert launcher["envFrom"] == [{"secretRef": {"name": "bucket"}}]


def test_runai_leaves_time_and_memory(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "runai", "")
    done = bash("runai.sh", bin_folder=tmp_path / "bin", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (messages,) = noted(tmp_path, "runai")
    assert messages[:3] == ["training", "pytorch", "submit"]
    grace = re.fullmatch(r"(\d+)s", after(messages, "--termination-grace-period"))
    assert grace is not None
    assert composed("runai.sh").fault.notice_s + FaultGroup().shutdown_grace_s <= int(grace[1])
    assert "--large-shm" in messages
    assert after(messages, "--env-pod-field-ref") == "POD_IP=status.podIP"
    assert after(messages, "--gpu-devices-request") == after(messages, "--master-gpu-devices-request")
    assert after(messages, "--restart-policy") == after(messages, "--master-restart-policy") == "OnFailure"
    assert messages[messages.index("--") + 1 :] == ["python", "-m", "elastictrain.launch", *run_arguments("runai.sh")]


def test_runai_of_an_older_command_line(tmp_path: Path) -> None:
    """Source: the options of `runai submit-dist pytorch` in the documents of Run:ai 2.18."""
    stand_in(tmp_path / "bin", "runai", "")
    copy = tmp_path / "runai.sh"
    copy.write_text((FOLDER / "runai.sh").read_text().replace("cli=2.24", "cli=2.18"))
    done = bash(str(copy), bin_folder=tmp_path / "bin", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (messages,) = noted(tmp_path, "runai")
    command = messages.index("--")
    assert messages[:2] == ["submit-dist", "pytorch"]
    known = {"--name", "--project", "--image", "--workers", "--gpu", "--large-shm", "--backoff-limit", "--command"}
    assert {datagram for datagram in messages[:command] if datagram.startswith("--")} == known
    assert messages[command + 1 : command + 4] == ["python", "-m", "elastictrain.launch"]
    config = load(messages[command + 4 :], with_task=False)
    assert config.fault.shutdown_grace_s < config.fault.notice_s <= _KUBERNETES_GRACE_S - 5


def vast_instance(messages: Sequence[str]) -> dict[str, str]:
    """The environment that an instance gets."""
    options = shlex.split(after(messages, "--env"))
    return dict(value.split("=", 1) for option, value in pairwise(options) if option == "-e")


def test_vast_puts_instances_on_one_overlay(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "vastai", "")
    stand_in(tmp_path / "bin", "python3", "")
    done = bash("vast.sh", "111", "222", bin_folder=tmp_path / "bin", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    # vastai 1.9 has no command for it; this is a method of its class `VastAI`.
    assert noted(tmp_path, "python3") == [
        ["-c", "import vastai; vastai.VastAI().create_overlay(cluster_id=1234, name='llama')"]
    ]
    instances = noted(tmp_path, "vastai")
    assert [messages[:3] for messages in instances] == [["create", "instance", offer] for offer in ("111", "222")]
    for rank, messages in enumerate(instances):
        assert shlex.split(after(messages, "--env"))[:2] == ["-n", "llama"]
        place = detect({"VAST_CONTAINERLABEL": "C.1", **vast_instance(messages)})
        assert (place.order, place.num_hosts) == (rank, 2)


def test_vast_alone_needs_no_overlay(tmp_path: Path) -> None:
    stand_in(tmp_path / "bin", "vastai", "")
    done = bash("vast.sh", "111", bin_folder=tmp_path / "bin", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ((first, second, _, *messages),) = noted(tmp_path, "vastai")
    assert (first, second, after(messages, "--env")) == ("create", "instance", "")
    assert bash("vast.sh", bin_folder=tmp_path / "bin", folder=tmp_path).returncode == EXIT_USAGE


@pytest.mark.parametrize(("codes", "starts"), [((0,), 1), ((75, 71, 0), 3), *[((code,), 1) for code in sorted(FINAL)]])
def test_vast_starts_again_unless_that_cannot_help(tmp_path: Path, codes: tuple[int, ...], starts: int) -> None:
    stand_in(tmp_path / "bin", "vastai", "")
    bash("vast.sh", "111", bin_folder=tmp_path / "bin", folder=tmp_path)
    command = after(noted(tmp_path, "vastai")[0], "--onstart-cmd")
    loop = command[: command.rindex(">>")]
    stand_in(tmp_path / "bin", "python", f'codes=({" ".join(map(str, codes))}); exit "${{codes[n]}}"')
    stand_in(tmp_path / "bin", "sleep", "")
    (tmp_path / "loop.sh").write_text(loop)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path)}
    subprocess.run(["bash", str(tmp_path / "loop.sh")], env=environment, check=False, timeout=30)
    calls = noted(tmp_path, "python")
    assert calls == [["-m", "elastictrain.launch", *run_arguments("vast.sh")]] * starts
    assert command.rstrip().endswith("&")


@pytest.fixture
def hosts_by_ssh(tmp_path: Path) -> Path:
    """Stand-ins for ssh, which runs what it is sent here, and for the Python of each host, which runs until it is stopped."""
    stand_in(tmp_path / "bin", "ssh", f"cd {shlex.quote(str(tmp_path))}; exec bash -s")
    python = tmp_path / "elastictrain" / ".venv" / "bin"
    python.mkdir(parents=True)
    stand_in(
        python,
        "python",
        'env | grep ^PET_ | sort >"$NOTES/place.$n"; trap "exit 75" TERM; for i in {1..300}; do sleep 0.1; done',
    )
    return tmp_path


def test_ssh_starts_looks_and_stops(hosts_by_ssh: Path) -> None:
    folder, bin_folder = hosts_by_ssh, hosts_by_ssh / "bin"
    try:
        started = bash("ssh.sh", "start", bin_folder=bin_folder, folder=folder)
        assert (started.returncode, started.stderr) == (0, "")
        assert started.stdout.count("started") == 3
        await_notes(folder, 3)
        assert noted(folder, "python") == [["-m", "elastictrain.launch", *run_arguments("ssh.sh")]] * 3
        places = [detect(dict(line.split("=", 1) for line in lines)) for lines in noted(folder, "place")]
        assert sorted(place.order for place in places) == [0, 1, 2]
        assert {place.num_hosts for place in places} == {3}
        assert bash("ssh.sh", "start", bin_folder=bin_folder, folder=folder).stdout.count("runs already") == 3
        assert bash("ssh.sh", "status", bin_folder=bin_folder, folder=folder).stdout.count(": runs") == 3
        stopped = bash("ssh.sh", "stop", bin_folder=bin_folder, folder=folder)
        assert (stopped.stderr, stopped.stdout.count("asked to stop")) == ("", 3)
        assert gone(folder)
        assert len(noted(folder, "python")) == 3
        assert bash("ssh.sh", "stop", bin_folder=bin_folder, folder=folder).stdout.count("does not run") == 3
    finally:
        for file in folder.glob("elastictrain/launcher-*.pid"):
            subprocess.run(["kill", "-9", file.read_text().strip()], check=False, capture_output=True, timeout=30)
    assert bash("ssh.sh", bin_folder=bin_folder, folder=folder).returncode == EXIT_USAGE


def await_notes(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(noted(folder, "place")) < number or not all(noted(folder, "place")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(folder: Path) -> bool:
    """Whether all launchers end within a few seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        listed = bash("ssh.sh", "status", bin_folder=folder / "bin", folder=folder).stdout
        if listed.count("does not run") == 3:
            return True
        time.sleep(0.05)
    return False
