"""Check `storage`: a small object makes the round trip through the run's folder, in a process that can be killed. A dead file
server blocks every access for ever, and a blocked thread cannot be ended; only a process can be killed."""

import errno
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from elastictrain.bounded_json import MalformedJsonError, parse_record
from elastictrain.cgroup import Mount, mount_of, read_mounts
from elastictrain.distributed.bounded import within
from elastictrain.distributed.exchange import Exchange, get_record, put_record
from elastictrain.errors import TransportError
from elastictrain.preflight.host.trip import FOLDER
from elastictrain.preflight.verdict import Reporter, Scope, Verdict
from elastictrain.storage.local import local_path
from elastictrain.storage.opening import open_store
from elastictrain.surroundings import Surroundings

_REMOVE_S = 2.0
LOOK = "look"  # the step that looks for what the first host left
SLOW_MS = 2000.0  # six small requests; slower ones delay every event and every commit

_COMMAND = (sys.executable, "-m", "elastictrain.preflight.host.trip")

# Address, how to give credentials, and the command that makes a bucket, up to its name.
_S3 = ("https://s3.amazonaws.com", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,", "aws s3 mb s3://")
_GCS = (
    "https://storage.googleapis.com",
    "set GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcloud storage buckets create gs://",
)
_AZURE = (
    "its address",
    "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY,",
    "az storage container create --name ",
)
_SERVICES = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}


@dataclass(frozen=True, slots=True)
class TripMessage:
    """One line that the process writes."""

    begun: str = ""  # a step that begins
    done: str = ""  # a step that is done
    ms: float = 0.0
    fault: str = ""  # a `storage.failures.Fault` by name, or CONFIG; STALLED or CRASHED without a line of its own
    errno: int | None = None
    message: str = ""
    end: bool = False  # the trip is complete


@dataclass(frozen=True, slots=True)
class TripFacts:
    """How far the trip came."""

    url: str
    steps: tuple[tuple[str, float], ...]  # completed steps and their milliseconds
    doing: str = ""  # the step after them
    failure: TripMessage | None = None
    mount: Mount | None = None  # of the folder, if it is on this host


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """Whether all hosts see what the first one leaves in the run's folder."""

    exchange: Exchange
    is_first: bool
    name: str = field(default_factory=lambda: f"shared-{secrets.token_hex(8)}")

    def announce(self, facts: TripFacts) -> None:
        """As the first host, after its trip."""
        with suppress(TransportError):
            if self.is_first:
                put_record(self.exchange, "storage/shared", "" if facts.failure else self.name)

    def announced(self, *, limit_s: float) -> str:
        """What this host must see, or nothing. It does not look earlier: a file server's client remembers what is missing."""
        with suppress(TransportError, MalformedJsonError):
            return "" if self.is_first else get_record(self.exchange, "storage/shared", str, limit_s=limit_s) or ""
        return ""

    def remove(self, url: str) -> None:
        """As the first host, when all have looked. Raises: TransportError."""
        if get_record(self.exchange, "storage/shared", str, limit_s=0.0):
            within(_REMOVE_S, lambda: open_store(url).delete(f"{FOLDER}/{self.name}"))


def blame_unshared(verdicts: Sequence[Verdict], *, num_hosts: int) -> list[Verdict]:
    """If no host sees what the first one writes, any of them may be the cause: the failure is the group's."""
    unseen = [one for one in verdicts if one.check == "storage" and str(one.measured).startswith(f"{LOOK}: ")]
    alike = len(unseen) == num_hosts - 1
    return [replace(one, scope=Scope.GROUP) if alike and one in unseen else one for one in verdicts]


def read_trip(
    surroundings: Surroundings,
    *,
    url: str,
    limit_s: float,
    command: Sequence[str] = _COMMAND,
    shared: SharedFolder | None = None,
) -> TripFacts:
    """Run the trip: milliseconds on a disk, a second on an object store, mostly for its import. It may take `limit_s`, and as
    long again if its process has not begun by then."""
    until = time.monotonic() + limit_s
    path = local_path(url)
    mount = mount_of(path, read_mounts(surroundings.root)) if path else None
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, [surroundings.environment.get("PYTHONPATH")])]
    process = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**surroundings.environment, "PYTHONPATH": os.pathsep.join(paths)},
        # torchrun forwards stop signals to process groups: in its group this process would end, and storage be blamed.
        process_group=0,
    )
    order = {"url": url, "patience_s": limit_s, "parent": os.getpid(), "leaves": "", "looks_for": ""}
    if shared is not None:
        order |= {"leaves": shared.name if shared.is_first else "", "looks_for": shared.announced(limit_s=limit_s / 2)}
    try:
        try:
            output, complaints = process.communicate(json.dumps(order).encode(), timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            if late.output:
                raise
            # It has not begun: processors are busy, for which the storage is not to blame.
            output, complaints = process.communicate(timeout=limit_s)
        last = (complaints.decode(errors="replace").strip().splitlines() or [""])[-1]
        how = f"exit code {process.returncode}: {last}" if process.returncode else "no word at its end"
        silent = TripMessage(fault="CRASHED", message=how)
    except subprocess.TimeoutExpired as stall:
        output, silent = stall.output or b"", TripMessage(fault="STALLED", message=f"no answer in {limit_s:g} s")
        process.kill()
        # Do not wait longer: the kernel cannot end the process until the file server answers.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.5)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        pipe.close()
    facts = parse_messages(output.decode(errors="replace"), url=url, mount=mount, silent=silent)
    if shared is not None:
        shared.announce(facts)
    return facts


def parse_messages(text: str, *, url: str, mount: Mount | None, silent: TripMessage) -> TripFacts:
    """Parse the lines that the process wrote; the last may be torn. `silent`: the failure if the lines have no end."""
    steps, doing, failure = list[tuple[str, float]](), "", silent
    for line in text.splitlines():
        try:
            message = parse_record(line, TripMessage)
        except ValueError:
            continue
        if message.end:
            return TripFacts(url, tuple(steps), mount=mount)
        if message.fault:
            failure = message
        elif message.done:
            steps.append((message.done, message.ms))
        doing = doing if message.fault else message.begun
    return TripFacts(url, tuple(steps), doing, failure, mount)


def judge_trip(facts: TripFacts | None, *, host: str, environment: Mapping[str, str]) -> Verdict:
    """`facts` is None if there is no run folder to try."""
    report = Reporter("storage", host)
    if facts is None:
        return report.skipped("no run.dir", remedy="to try one: run.dir=PATH_OR_URL")
    if (failure := facts.failure) is not None:
        measured, expected = f"{facts.doing or 'start'}: {failure.message}", f"create, read, list and delete in {facts.url}"
        remedy, may_pass = _remedy(facts, failure, host, environment), failure.fault in ("TRANSIENT", "STALLED")
        return replace(report.failed(measured, expected=expected, remedy=remedy), may_pass=may_pass)
    total_ms = round(sum(ms for _, ms in facts.steps), 1)
    if total_ms > SLOW_MS:
        slowest, ms = max(facts.steps, key=lambda step: step[1])
        remedy = f"`{slowest}` alone took {ms:.0f} ms: {_stall_remedy(facts, host, environment)}"
        return report.warned(total_ms, expected=SLOW_MS, unit="ms", remedy=remedy)
    return report.passed(total_ms, expected=SLOW_MS, unit="ms")


def _remedy(facts: TripFacts, failure: TripMessage, host: str, environment: Mapping[str, str]) -> str:
    url, path = facts.url, local_path(facts.url)
    if failure.errno == errno.EROFS and path:
        mounting = f"`mount -o remount,rw {facts.mount.point if facts.mount else path}`"
        broken = "a disk with errors becomes read-only by itself: `dmesg | tail`"
        return f"on {host}: {mounting}, or set run.dir to a folder that can be written; {broken}"
    if facts.doing == LOOK and failure.fault in ("NOT_FOUND", "PERMANENT"):
        mount = f"mount the first host's file system at {path} on {host} (`df {path}`), or " if path else ""
        return f"{mount}set run.dir to a place that is the same on all hosts"
    protocol, _, rest = url.partition("://")
    service = _SERVICES.get(protocol)
    match failure.fault:
        # The store cannot be reached, or answers with temporary errors.
        case "STALLED" | "TRANSIENT":
            return _stall_remedy(facts, host, environment)
        case "CRASHED":
            return f"try it by hand on {host}: `python -c 'import elastictrain.storage.opening'`, then `dmesg | tail`"
        case "CONFIG":
            return "correct run.dir, or install what its protocol needs, as the message says"
        case "FULL" if path:
            freeing = f"`python -m elastictrain.checkpoint prune {path}`, or set run.dir to a folder with more room"
            return f"on {host}: `df -h {path}; df -i {path}`, then {freeing}"
        case "FULL":
            return f"raise the quota of {url}, or `python -m elastictrain.checkpoint prune {url}`"
        case "DENIED" if path:
            user = psutil.Process().username()
            return f"as root on {host}: `chown -R {user} {path}`, or set run.dir to a folder that {user} can write"
        case "DENIED":
            credentials = service[1] if service else f"set credentials for {protocol}://"
            return f"{credentials} on {host}, for a role that may read, write, list and delete in {url}"
        case "NO_BUCKET":
            bucket = rest.partition("/")[0]
            return f"`{service[2]}{bucket}`, or correct run.dir" if service else f"create {bucket}, or correct run.dir"
    if path:
        return f"look with `ls -ld {path}` on {host}, or set run.dir to another folder"
    return f"set run.dir to another store than {url}, or mend this one as the message says"


def _stall_remedy(facts: TripFacts, host: str, environment: Mapping[str, str]) -> str:
    if path := local_path(facts.url):
        mount = f"{facts.mount.kind} at {facts.mount.point}" if facts.mount else "file system"
        return f"on {host}: `timeout 5 stat -f {path}`; its {mount} must answer: look at its server and `dmesg | tail`"
    service = _SERVICES.get(facts.url.partition("://")[0])
    address = service[0] if service else "its address"
    if service is _S3:
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        address = next((environment[name] for name in names if environment.get(name)), address)
    return f"on {host}: `curl -m 5 -sS -o /dev/null {address}` must answer; check the route, the firewall and HTTPS_PROXY there"
