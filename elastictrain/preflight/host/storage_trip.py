"""Check `storage`: a small object makes the round trip through the run's folder, in a process that can be killed.

A dead file server stalls whoever touches it, for ever and beyond the reach of any thread; only a process of its own can be
given up.
"""

import errno
import getpass
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastictrain.preflight.host.disk import local_path
from elastictrain.preflight.host.mounts import Mount, mount_of, read_mounts
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Reporter, Verdict

LIMIT_S = 8.0
"""A round trip takes milliseconds on a disk and about a second on an object store, most of it for loading its client."""

SLOW_MS = 2000.0
"""Six small requests that take longer together will make every event and every commit slow."""

_REAPING_S = 0.5

_TRANSIENT = "TRANSIENT"
"""The store cannot be reached, or has an hour in which it answers with errors of its own."""

_COMMAND = (sys.executable, "-m", "elastictrain.preflight.host.trip")


@dataclass(frozen=True, slots=True)
class TripFailure:
    """What the store said. `fault` is the name of a `storage.failures.Fault`, or CONFIG; `number` is an errno."""

    fault: str
    number: int | None
    message: str


@dataclass(frozen=True, slots=True)
class TripFacts:
    """How far the trip came. `steps` are those that were completed, each with its milliseconds."""

    url: str
    steps: tuple[tuple[str, float], ...]
    ended: bool
    doing: str = ""
    failure: TripFailure | None = None
    stalled_s: float | None = None
    """When it was killed, if it was."""

    crashed: str = ""
    """How the process ended without a word."""

    mount: Mount | None = None
    """What the folder lies on, if it is one on this host."""


def read_trip(
    surroundings: Surroundings, *, url: str, limit_s: float = LIMIT_S, command: Sequence[str] = _COMMAND
) -> TripFacts:
    """Sends an object out and waits for it, `limit_s` at most."""
    path = local_path(url)
    mount = mount_of(path, read_mounts(surroundings)) if path else None
    order = json.dumps({"url": url, "patience_s": limit_s, "parent": os.getpid()}).encode()
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, [surroundings.environment.get("PYTHONPATH")])]
    process = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**surroundings.environment, "PYTHONPATH": os.pathsep.join(paths)},
        # torchrun passes a request to stop on to groups of processes: this one would die of it, and storage be blamed.
        process_group=0,
    )
    try:
        output, complaints = process.communicate(order, timeout=limit_s)
    except subprocess.TimeoutExpired as stall:
        _end(process)
        return parse_words(_text(stall.output), url=url, mount=mount, stalled_s=limit_s)
    last = (_text(complaints).strip().splitlines() or [""])[-1]
    crashed = f"exit code {process.returncode}: {last}" if process.returncode else ""
    return parse_words(_text(output), url=url, mount=mount, crashed=crashed)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process; does not wait where the kernel cannot let go of it, which is so until the file server answers."""
    process.kill()
    try:
        process.communicate(timeout=_REAPING_S)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def parse_words(text: str, *, url: str, mount: Mount | None, stalled_s: float | None = None, crashed: str = "") -> TripFacts:
    """From the lines that the process wrote; the last one may be torn."""
    steps: list[tuple[str, float]] = []
    doing, failure, ended = "", None, False
    for line in text.splitlines():
        try:
            word = json.loads(line)
        except ValueError:
            continue
        if not isinstance(word, dict):
            continue
        doing = str(word.get("begun", doing))
        if isinstance(word.get("ms"), int | float):
            steps.append((str(word.get("done")), float(word["ms"])))
            doing = ""
        if "fault" in word:
            number = word.get("errno")
            failure = TripFailure(str(word["fault"]), number if isinstance(number, int) else None, str(word.get("message")))
        ended = ended or word.get("end") is True
    if failure is None and not ended and stalled_s is None:
        crashed = crashed or "no word at its end"
    return TripFacts(url, tuple(steps), ended, doing, failure, stalled_s, crashed, mount)


def judge_trip(facts: TripFacts | None, *, host: str, environment: Mapping[str, str]) -> Verdict:
    """None: there is no run's folder to try."""
    report = Reporter("storage", host)
    if facts is None:
        return report.skipped("no run.dir", remedy="to try one: run.dir=PATH_OR_URL")
    expected = f"create, read, list and delete in {facts.url}"
    if facts.failure is not None:
        remedy = _remedy(facts, facts.failure, host, environment)
        measured, may_pass = f"{facts.doing or 'trip'}: {facts.failure.message}", facts.failure.fault == _TRANSIENT
        return report.failed(measured, expected=expected, remedy=remedy, may_pass=may_pass)
    if facts.stalled_s is not None:
        measured = f"{facts.doing or 'start'}: no answer in {facts.stalled_s:g} s"
        return report.failed(measured, expected=expected, remedy=_stall_remedy(facts, host, environment), may_pass=True)
    if facts.crashed or not facts.ended:
        remedy = f"try it by hand on {host}: `python -c 'import elastictrain.storage.opening'`, then `dmesg | tail`"
        return report.failed(f"{facts.doing or 'start'}: {facts.crashed}", expected=expected, remedy=remedy)
    total_ms = round(sum(ms for _, ms in facts.steps), 1)
    if total_ms > SLOW_MS:
        slowest, ms = max(facts.steps, key=lambda step: step[1])
        remedy = f"`{slowest}` alone took {ms:.0f} ms: {_stall_remedy(facts, host, environment)}"
        return report.warned(total_ms, expected=SLOW_MS, unit="ms", remedy=remedy)
    return report.passed(total_ms, expected=SLOW_MS, unit="ms")


def _remedy(facts: TripFacts, failure: TripFailure, host: str, environment: Mapping[str, str]) -> str:
    path = local_path(facts.url)
    if failure.number == errno.EROFS and path:
        point = facts.mount.point if facts.mount else path
        return (
            f"on {host}: `mount -o remount,rw {point}`, or set run.dir to a folder that can be written; a disk with errors "
            "becomes read-only by itself: `dmesg | tail`"
        )
    if failure.fault == "FULL":
        if path:
            freeing = f"`python -m elastictrain.checkpoint prune {path}`, or set run.dir to a folder with more room"
            return f"on {host}: `df -h {path}; df -i {path}`, then {freeing}"
        return f"raise the quota of {facts.url}, or `python -m elastictrain.checkpoint prune {facts.url}`"
    if failure.fault == "DENIED":
        if path:
            return f"as root on {host}: `chown -R {_user()} {path}`, or set run.dir to a folder that {_user()} can write"
        return f"{_credentials(facts.url)} on {host}, for a role that may read, write, list and delete in {facts.url}"
    if failure.fault == "NO_BUCKET":
        return _bucket(facts.url)
    if failure.fault == _TRANSIENT:
        return _stall_remedy(facts, host, environment)
    if failure.fault == "CONFIG":
        return "correct run.dir, or install what its protocol needs, as the message says"
    if path:
        return f"look with `ls -ld {path}` on {host}, or set run.dir to another folder"
    return f"set run.dir to another store than {facts.url}, or mend this one as the message says"


def _stall_remedy(facts: TripFacts, host: str, environment: Mapping[str, str]) -> str:
    path = local_path(facts.url)
    if path:
        mount = f"{facts.mount.kind} at {facts.mount.point}" if facts.mount else "file system"
        return f"on {host}: `timeout 5 stat -f {path}`; its {mount} must answer: look at its server and `dmesg | tail`"
    protocol = facts.url.partition("://")[0]
    endpoint = next((environment[name] for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if environment.get(name)), None)
    default = {"s3": "https://s3.amazonaws.com", "s3a": "https://s3.amazonaws.com", "gs": "https://storage.googleapis.com"}
    address = (endpoint if protocol in ("s3", "s3a") else None) or default.get(protocol, "its address")
    return f"on {host}: `curl -m 5 -sS -o /dev/null {address}` must answer; check the route, the firewall and HTTPS_PROXY there"


def _credentials(url: str) -> str:
    protocol = url.partition("://")[0]
    if protocol in ("s3", "s3a"):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,"
    if protocol in ("gs", "gcs"):
        return "set GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`"
    if protocol in ("az", "abfs", "abfss"):
        return "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY,"
    return f"set credentials for {protocol}://"


def _bucket(url: str) -> str:
    protocol, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    making = {"s3": "aws s3 mb s3://", "s3a": "aws s3 mb s3://", "gs": "gcloud storage buckets create gs://"}.get(protocol)
    if protocol in ("az", "abfs", "abfss"):
        making = "az storage container create --name "
    return f"`{making}{bucket}`, or correct run.dir" if making else f"create {bucket}, or correct run.dir"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
