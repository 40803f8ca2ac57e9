"""Machines of three clouds, each with its cloud's metadata service, which takes them away; the run goes on afterwards."""

import sys
import time
from pathlib import Path

from torchruns import REPOSITORY, TINY, events, last_step, wait_until

from elastictrain.chaos.fleet import LauncherFleet
from elastictrain.chaos.network.hosts import VirtualHost, VirtualNetwork

LEFT_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
SAYS = {
    "aws": "AWS terminates this spot instance",
    "gcp": "Google Cloud takes this spot instance",
    "azure": "Azure takes this spot",
}
ARGUMENTS = (
    *TINY,
    "optim.schedule=constant",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=0",
    "task._target_=tests.process.paced.PacedLlama",
    "launch.max_hosts=1",
    "launch.join_s=5",
)
_SERVER = Path(__file__).with_name("metadata_host.py")


def into_cloud(host: VirtualHost, cloud: str, *, taken: Path) -> None:
    """Make a host a machine of a cloud, which takes it when the file `taken` is there."""
    host.namespaces.ip("address", "add", "169.254.169.254/32", "dev", "lo")
    # What the firmware of this machine says would count for more.
    firmware = Path("/sys/class/dmi")
    if firmware.exists():
        host.popen(["mount", "-t", "tmpfs", "none", firmware], log=taken.parent / "mount.txt").wait(10)
    command = [sys.executable, _SERVER, cloud, str(LEFT_S[cloud]), taken]
    server = host.popen(command, log=taken.parent / "metadata.txt", extra_environment={"PYTHONPATH": str(REPOSITORY)})
    # A launcher looks for its cloud once, when it starts.
    wait_until(lambda: "serving" in server.output(), timeout_s=60, what="the metadata service")


def test_each_clouds_notice_is_saved_in_time_and_the_next_start_goes_on(network: VirtualNetwork, tmp_path: Path) -> None:
    fleets: dict[str, LauncherFleet] = {}
    hosts = {cloud: network.add(cloud) for cloud in LEFT_S}
    for cloud, host in hosts.items():
        folder = tmp_path / cloud
        folder.mkdir()
        into_cloud(host, cloud, taken=folder / "taken")
        fleets[cloud] = LauncherFleet(folder / "run", folder / "logs", [*ARGUMENTS, f"checkpoint.memory_dir={host.memory}"])
        fleets[cloud].start(host, more=["train.steps=100000", "task.pause_s=0.05"])
    for cloud, fleet in fleets.items():
        fleet.wait_for_step(5, timeout_s=120)
        (tmp_path / cloud / "taken").touch()
        began_s = time.monotonic()
        assert fleet.wait(timeout_s=60) == {cloud: 75}, fleet.output()[-6000:]
        # The service is asked every two seconds, and workers need not be given the time that there is.
        assert time.monotonic() - began_s < min(LEFT_S[cloud], 20.0)
        (notice,) = events(fleet.run_dir, "notice")
        assert SAYS[cloud] in notice["reason"]
        assert notice["leave"] is True
        assert 0 < notice["deadline"] - notice["time"] <= LEFT_S[cloud] + 1.0
        (stop,) = events(fleet.run_dir, "stop")
        assert (stop["exit_code"], stop["saved"], stop["saved_step"]) == (75, "storage", stop["step"])
        assert SAYS[cloud] in stop["reason"]
    for cloud, fleet in fleets.items():
        (stop,) = events(fleet.run_dir, "stop")
        fleet.start(hosts[cloud], more=[f"train.steps={stop['step'] + 3}", "launch.notices=false"])
    for cloud, fleet in fleets.items():
        assert fleet.wait(timeout_s=90) == {cloud: 0}, fleet.output()[-6000:]
        stop, _ = events(fleet.run_dir, "stop")
        assert events(fleet.run_dir, "resume")[-1]["step"] == stop["step"]
        wait_until(lambda fleet=fleet, stop=stop: last_step(fleet.run_dir) == stop["step"] + 3, what="the last step")
