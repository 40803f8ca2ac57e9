"""Templates for spot machines against the real tools: hadolint, docker's and vastai's commands, systemd, published schemas."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastictrain.config.load import load
from elastictrain.errors import EXIT_STOPPED, EXIT_UNFIT
from elastictrain.launch.cluster.detect import detect
from tests.integration.launch.templates import (
    FINAL,
    FOLDER,
    REPOSITORY,
    bash,
    bash_array,
    noted,
    read_yaml,
    stand_in,
    with_options,
)

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"
_LAST_SYSTEM_USER = 999
_LONGEST_NOTICE_S = 120  # AWS


def tool(name: str) -> str:
    """A command of the virtual environment or of this machine; skips the test if there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


# docker/Dockerfile


def instructions() -> list[list[str]]:
    """Each instruction's words, without options."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [[word for word in line.split() if not word.startswith("--")] for line in text.splitlines() if line]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_as_a_system_user_from_pinned_bases() -> None:
    stages: dict[str, list[list[str]]] = {}
    for words in instructions():
        if words[0] == "FROM":
            name = words[3]
            assert words[1] in stages or re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", words[1])
            stages[name] = []
        else:
            stages[name].append(words)
    (number,) = re.findall(r"useradd --system --uid (\d+)", DOCKERFILE.read_text())
    # logind removes what other users have in the host's /dev/shm when they log out.
    assert int(number) <= _LAST_SYSTEM_USER
    for target in ("cpu", "cuda"):
        assert stages[target][-1] == ["USER", number]
    assert set(re.findall(r"--target (\w+)", DOCKERFILE.read_text())) <= stages.keys()


def test_the_image_gets_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    """The paths that are copied exist, are let through, and are those that tests/process/test_wheel.py builds from."""
    copied = {source for words in instructions() if words[0] == "COPY" for source in words[1:-1]}
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "conf", "elastictrain", "recipes"}
    assert copied == needed | {"constraints-cpu.txt"}
    assert all((REPOSITORY / name).exists() for name in copied)
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied


def test_the_image_installs_extras_that_exist_and_the_pinned_torch() -> None:
    text = DOCKERFILE.read_text()
    project = (REPOSITORY / "pyproject.toml").read_text()
    extras = {one for found in re.findall(r"whl\)\[([a-z0-9,]+)\]", text) for one in found.split(",")}
    assert extras >= {"s3", "gcs", "azure"}
    assert all(re.search(rf"^{one} = \[", project, re.MULTILINE) for one in extras)
    (pattern,) = re.findall(r"grep '([^']+)' /tmp/constraints.txt", text)
    assert len(re.findall(pattern, (REPOSITORY / "constraints-cpu.txt").read_text(), re.MULTILINE)) == 1


# scripts/cluster/user-data.sh


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit that the start script writes, with stand-ins for docker and systemctl."""
    script, written = tmp_path / "user-data.sh", tmp_path / "elastictrain.service"
    script.write_text((FOLDER / "user-data.sh").read_text().replace("/etc/systemd/system", str(tmp_path)))
    stand_in(tmp_path / "bin", "systemctl", "")
    done = bash(str(script), bin_folder=tmp_path / "bin", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    name = "elastictrain.service"
    assert noted(tmp_path, "systemctl") == [["daemon-reload"], ["enable", name], ["start", "--no-block", name]]
    return written


def test_any_argument_reaches_the_launcher_of_the_unit(tmp_path: Path) -> None:
    argument = r"""data.sources=[{path: "a%20b", weight: $HOME\n}]"""
    text = (FOLDER / "user-data.sh").read_text().replace("/etc/systemd/system", str(tmp_path))
    script = tmp_path / "user-data.sh"
    script.write_text(text.replace("    launch.min_hosts=1\n", f"    {shlex.quote(argument)}\n"))
    stand_in(tmp_path / "bin", "systemctl", "")
    assert bash(str(script), bin_folder=tmp_path / "bin", folder=tmp_path).returncode == 0
    line = read_unit(tmp_path / "elastictrain.service")["Service"]["ExecStart"]
    unquoted = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]
    assert argument in unquoted


def read_unit(path: Path) -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text().replace("\\\n", " "))
    return parser


def test_systemd_accepts_the_unit(unit: Path) -> None:
    stand_in(unit.parent / "bin", "docker", "")
    unit.write_text(unit.read_text().replace("/usr/bin/docker", str(unit.parent / "bin" / "docker")))
    (unit.parent / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", str(unit)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{unit.parent}:"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    ours = [line for line in done.stderr.splitlines() if "elastictrain" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_unit_trains_and_leaves_time_to_save(unit: Path) -> None:
    service = read_unit(unit)["Service"]
    words = shlex.split(service["ExecStart"])
    launcher = words[words.index("python") :]
    assert launcher == ["python", "-m", "elastictrain.launch", *bash_array((FOLDER / "user-data.sh").read_text())]
    config = load(launcher[3:], with_task=False)
    assert config.fault.shutdown_grace_s < config.fault.notice_s < int(service["TimeoutStopSec"])
    # Hosts of a group have no numbers, and meet through the run's folder.
    assert detect({}).num_hosts == 0
    assert (service["KillMode"], service["Restart"]) == ("mixed", "on-failure")
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == FINAL
    assert int(service["RestartSec"]) > _LONGEST_NOTICE_S


def test_docker_reads_the_options_of_the_unit(unit: Path) -> None:
    """docker's command checks them before it asks its daemon, which is not there."""
    docker = tool("docker")
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        key, _, command = line.partition("=")
        if key in ("ExecStart", "ExecStartPre"):
            words = shlex.split(command.removeprefix("-"))
            assert words[0] == "/usr/bin/docker"
            done = subprocess.run(
                [docker, *words[1:]],
                env={**os.environ, "DOCKER_HOST": f"unix://{unit.parent}/nobody"},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert f"unix://{unit.parent}/nobody" in done.stderr


# scripts/cluster/skypilot.yaml


def test_a_host_of_skypilot_finds_its_place(tmp_path: Path) -> None:
    """Source of the variables: SkyPilot's page on distributed jobs."""
    task = read_yaml("skypilot.yaml")
    stand_in(tmp_path / "bin", "python", 'env | grep ^PET_ >"$NOTES/place"')
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(tmp_path / "bin")
    given = {
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_RANK": "2",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
    }
    script = tmp_path / "run.sh"
    script.write_text(f"set -eu\n{task['run']}")
    done = bash(str(script), bin_folder=tmp_path / "bin", folder=tmp_path, environment=given | task["envs"])
    assert (done.returncode, done.stderr) == (0, "")
    (words,) = noted(tmp_path, "python")
    assert words[:2] == ["-m", "elastictrain.launch"]
    assert load(words[2:], with_task=False).run.dir == task["envs"]["RUN_DIR"]
    place = detect(dict(line.split("=", 1) for line in (tmp_path / "place").read_text().splitlines()))
    assert (place.order, place.num_hosts, place.peers) == (2, task["num_nodes"], ("10.0.0.1",))


def test_skypilot_starts_again_what_was_stopped() -> None:
    resources = read_yaml("skypilot.yaml")["resources"]
    assert resources["use_spot"] is True
    # 137, with which it ends the other hosts, comes with every code: it would start again what cannot succeed.
    assert resources["job_recovery"]["recover_on_exit_codes"] == [EXIT_UNFIT, EXIT_STOPPED]
    assert "max_restarts_on_errors" not in resources["job_recovery"]


@pytest.mark.skipif(
    find_spec("sky") is None, reason="needs skypilot, which is not in the extra `dev`: it brings a hundred packages"
)
def test_skypilot_reads_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    import sky

    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.use_spot) == (4, True)
    assert resources.job_recovery["recover_on_exit_codes"] == [EXIT_UNFIT, EXIT_STOPPED]


# scripts/cluster/kubernetes.yaml


@pytest.mark.parametrize(
    "job", [read_yaml("kubernetes.yaml"), with_options("kubernetes.yaml")], ids=["as it is", "with its options"]
)
def test_kubernetes_accepts_the_job(job: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    # podReplacementPolicy is on by default since the first.
    for version in ("1.29", "1.31", validate.latest_version()):
        validate.validate(job, version, strict=True)


def test_a_jobset_takes_the_job() -> None:
    """As docs/clusters.md says. What its models do not know is lost on the way through them."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = read_yaml("kubernetes.yaml")
    wrapped = {"replicatedJobs": [{"name": "hosts", "template": {"spec": job["spec"]}}]}
    job_set = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": job["metadata"], "spec": wrapped}
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() == job_set
    job["spec"]["podFailurePolicies"] = {}
    assert models.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() != job_set


# scripts/cluster/vast.sh

# Requests of the real command get an answer here, and are written down.
_ANSWERING = """
import json, os
import requests

def send(self, request, **options):
    body = request.body.decode() if isinstance(request.body, bytes) else request.body
    with open(os.environ["ASKED"], "a") as file:
        file.write(json.dumps([request.method, request.url.partition("?")[0], body]) + "\\n")
    answer = requests.Response()
    answer.status_code, answer.request, answer.url = 200, request, request.url
    answer._content = b'{"success": true, "new_contract": 7, "gpu_names": []}'
    return answer

requests.Session.send = send
"""


def asked(file: Path) -> Sequence[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_command_of_vast_rents_what_the_template_asks_for(tmp_path: Path) -> None:
    command = tool("vastai")
    (tmp_path / "sitecustomize.py").write_text(_ANSWERING)
    (tmp_path / "vastai").mkdir()
    given = {"ASKED": str(tmp_path / "asked"), "PYTHONPATH": str(tmp_path), "VAST_API_KEY": "key", "HOME": str(tmp_path)}
    given |= {"XDG_CACHE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    stand_in(tmp_path / "bin", "unused", "")
    (tmp_path / "bin" / "vastai").symlink_to(command)
    done = bash("vast.sh", "111", bin_folder=tmp_path / "bin", folder=tmp_path, environment=given)
    assert (done.returncode, done.stderr) == (0, "")
    ((url, body),) = ((url, json.loads(body)) for method, url, body in asked(tmp_path / "asked") if method == "PUT")
    assert url.endswith("/asks/111/")
    assert (body["image"], body["disk"], body["label"]) == ("registry.example.com/elastictrain:latest", 200.0, "llama-0")
    assert "python -m elastictrain.launch" in body["onstart"]
