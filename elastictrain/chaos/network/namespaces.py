"""Nameless namespaces for a host: network, hostname and mounts.

They live as long as a process is in them. So two users cannot meet, and nothing of them is left behind, not even when who made
them is killed.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_END_LIMIT_S = 60.0

# It is the first process in the new namespaces, and keeps them for as long as we hold the other end of its input: it also ends
# when we are killed. /sys tells of the interfaces of the namespace in which it was mounted; the control groups in it stay.
_ANCHOR = """
set -eu
trap 'rm -rf --one-file-system -- "$4"' EXIT
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs "$3"
mount --rbind /sys/fs/cgroup "$3/fs/cgroup"
mount --move "$3" /sys
ip link set lo up
echo ready
read -r _ || true
"""


def unavailable() -> str | None:
    """Why this machine can have no hosts, or None if it can."""
    missing = [tool for tool in ("hostname", "ip", "mount", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        return f"needs {', '.join(missing)}" if missing else "needs root, to make network namespaces"
    steps = "mount -t sysfs sysfs /sys && ip link add name b type bridge && ip link add name p type veth peer name q"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", steps]
    probe = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    return f"network namespaces do not work here: {probe.stderr.strip()}" if probe.returncode else None


class Namespaces:
    """Network, hostname and mounts that processes can be started in. With them goes the file or folder `removed`."""

    def __init__(self, hostname: str, *, folder: Path, hosts_file: Path, removed: Path) -> None:
        folder.mkdir(parents=True)
        self._anchor = subprocess.Popen(  # noqa: S603
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", _ANCHOR, "anchor", hostname, hosts_file, folder, removed],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for whoever made it, and ends this in its turn
        )
        ready = self._anchor.stdout.readline() if self._anchor.stdout else ""
        if ready != "ready\n":
            message = self._anchor.communicate()[1]
            raise RuntimeError(f"host {hostname} cannot be made: {message.strip()}")
        self.network = _network_of(self.pid)

    @property
    def pid(self) -> int:
        return self._anchor.pid

    def entered(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs `command` in here; its working directory is to be set anew, in another tree of mounts."""
        # nsenter becomes the command, so signals to it reach the command.
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--", *map(str, command)]

    @property
    def files(self) -> list[str]:
        """What a process enters to be in here; mounts come last."""
        return [f"/proc/{self.pid}/ns/{kind}" for kind in ("net", "uts", "mnt")]

    def ip(self, *words: str) -> None:
        """`ip ...` in here. Raises: RuntimeError with what it complains about."""
        run_tool(*self.entered(["ip", *words]))

    def inhabitants(self) -> list[int]:
        """Every process in here but the one that keeps the place, whoever started it."""
        return [pid for pid in processes_in(self.network) if pid != self.pid]

    def close(self) -> None:
        """Give the namespaces up. The kernel removes interfaces with them."""
        self._anchor.communicate(timeout=_END_LIMIT_S)


def run_tool(*command: str) -> None:
    """Run a command to its end. Raises: RuntimeError with what it complains about."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _network_of(pid: int | str) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def processes_in(network: int) -> list[int]:
    """Living processes in a network namespace, given by its inode."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if _network_of(entry.name) == network:
                    found.append(int(entry.name))
    return found
