"""Check `alike`: whether all hosts have the same code, configuration, packages, settings and devices. Hosts exchange
descriptions of themselves. `compare` names those that differ: with three or more hosts the minority, with two the second."""

import ctypes
import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from elastictrain.preflight.host.gpu import GpuReport
from elastictrain.preflight.verdict import Reporter, Verdict

DECISIVE = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")  # the same on all hosts: ranks use their protocols
# A difference in these may change results, or what works, on one host only.
OTHERS = ("numpy", "xxhash", "fsspec", "s3fs", "gcsfs", "adlfs", "safetensors", "transformers", "tokenizers", "torchao")
NCCL_LOADED = "NCCL that is loaded"
# Collectives hang where ranks differ in these: they choose algorithms, buffers or networks. Source: NCCL's issue 1136.
MUST_MATCH = {
    *(*DECISIVE, NCCL_LOADED, "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_NTHREADS", "NCCL_NET_OVERHEAD", "NCCL_IB_DISABLE"),
    *("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_SOCKET_FAMILY", "NCCL_IB_ADDR_FAMILY"),
    *("NCCL_NVLS_ENABLE", "NCCL_CROSS_NIC"),
}
# Settings that name something of a host, and may differ.
OF_ONE_HOST = re.compile(r"(NCCL|GLOO)_(SOCKET_IFNAME|IB_HCA|IB_GID_INDEX|DEBUG.*|HOSTID|CONF_FILE|TOPO_.*|GRAPH_.*)")
_LIBRARY = re.compile(r"\S*/lib[nr]ccl\.so\S*")
_MENDING = {
    NCCL_LOADED: "remove what LD_LIBRARY_PATH or LD_PRELOAD adds, or install the same package",
    "driver": "install the same driver",
    "model": "let the run use hosts with GPUs of one kind",
    "ECC": "as root `nvidia-smi -e 1` (0: off), and reboot",
    "MIG": "as root, with the GPUs idle, `nvidia-smi -mig 0` (1: on)",
    "persistence": "as root `nvidia-smi -pm 1`",
    "power limit": "as root `nvidia-smi -pl WATTS`",
}
_MOST_FILES = 4000
_MOST_BYTES = 64 << 20
_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class SoftwareDigest:
    """What one host runs."""

    code: Mapping[str, str]  # digest of each package's modules and folders ("elastictrain/train")
    folders: Mapping[str, str]  # where each package is
    versions: Mapping[str, str]
    config: str = ""  # digest of what all must have in common; empty if unknown
    checkouts: tuple[str, ...] = ()  # packages in a git checkout
    settings: Mapping[str, str] = field(default_factory=dict)  # NCCL's and gloo's, that a person made
    devices: Mapping[str, str] = field(default_factory=dict)  # what is known of the GPUs, and the loaded NCCL


def describe(
    packages: Sequence[str] = ("elastictrain",),
    *,
    config: str = "",
    settings: Mapping[str, str] = {},
    devices: Mapping[str, str] = {},
) -> SoftwareDigest:
    """What this host runs, without importing it. Of `packages` the outermost ones count, if not too large."""
    code: dict[str, str] = {}
    folders: dict[str, str] = {}
    checkouts = []
    for package in dict.fromkeys(name.partition(".")[0] for name in packages):
        origin = _origin(package)
        if origin is not None and (digests := digest_code(origin)) is not None:
            code |= digests
            folders[package] = str(origin)
            if (origin.parent / ".git").exists():
                checkouts.append(package)
    versions = {"python": platform.python_version()}
    for name in (*DECISIVE, *OTHERS):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return SoftwareDigest(code, folders, versions, config, tuple(checkouts), settings, devices)


def describe_devices(
    report: GpuReport | None, *, maps: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> dict[str, str]:
    """What this host's GPUs have in common with those of other hosts. `maps`: /proc/self/maps of a process with torch."""
    found: dict[str, str] = {"driver": report.driver} if report is not None and report.driver else {}
    for name, value in sorted({trait for gpu in report.gpus for trait in gpu.traits} if report is not None else ()):
        found[name] = f"{found[name]}, {value}" if name in found else value
    number = ctypes.c_int(0)
    if library := _LIBRARY.search(maps):
        with suppress(OSError, AttributeError):
            # It is loaded already. Source: nccl.h, NCCL_VERSION since 2.9.
            load(library[0]).ncclGetVersion(ctypes.byref(number))
    if number.value:
        found[NCCL_LOADED] = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return found


def digest_code(origin: Path) -> dict[str, str] | None:
    """Digests of a package's .py files (name, size, content) per top module and folder; None: too large or unreadable."""
    digests: dict[str, hashlib._Hash] = {}
    num_files = num_bytes = 0
    try:
        for path in [origin] if origin.is_file() else sorted(origin.rglob("*.py")):
            name = path.relative_to(origin.parent).as_posix()
            if "/." in name or "__pycache__" in name:
                continue
            content = path.read_bytes()
            num_files, num_bytes = num_files + 1, num_bytes + len(content)
            if num_files > _MOST_FILES or num_bytes > _MOST_BYTES:
                return None
            part = "/".join(name.split("/")[:2])
            digest = digests.setdefault(part, hashlib.sha256())
            digest.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape"))
            digest.update(content)
    except OSError:
        return None
    return {part: digest.hexdigest()[:16] for part, digest in digests.items()}


def _origin(package: str) -> Path | None:
    """The folder of a package, or the file of a module."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        # A module made at run time has no spec.
        return None
    # `__main__` is another name for the started module.
    if spec is None or spec.name != package:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def compare(hosts: Mapping[str, SoftwareDigest]) -> list[Verdict]:
    """For each host its differences from the others, or one pass. `hosts` is in the order of the group."""
    found, order = [*_code(hosts), *_values(hosts), *_config(hosts)], list(hosts)
    passed = [Reporter("alike", host).passed("alike", expected="alike") for host in {*hosts} - {one.subject for one in found}]
    return sorted([*found, *passed], key=lambda one: order.index(one.subject))


def _model(values: Mapping[str, str]) -> str:
    """The host to compare with: the first of those with the most frequent value; empty without any."""
    counts = Counter(values.values())
    # Without a majority the order decides: of two hosts, the first is right.
    return max(values, key=lambda host: counts[values[host]], default="")


def _config(hosts: Mapping[str, SoftwareDigest]) -> Iterator[Verdict]:
    # A host without a digest has an unknown configuration.
    configs = {host: likeness.config for host, likeness in hosts.items() if likeness.config}
    right_host = _model(configs)
    for host, config in configs.items():
        if config != configs[right_host]:
            comparing = "compare what `python -m elastictrain.run ... --cfg job` prints on both"
            remedy = f"start {host} with the same command line and config folder as {right_host}; {comparing}"
            expected = f"{configs[right_host][:12]} as on {right_host}"
            yield Reporter("alike", host).failed(f"config {config[:12]}", expected=expected, remedy=remedy)


def _code(hosts: Mapping[str, SoftwareDigest]) -> Iterator[Verdict]:
    right_host = _model({host: json.dumps(sorted(likeness.code.items())) for host, likeness in hosts.items()})
    for host, own in hosts.items():
        right = hosts[right_host]
        parts = sorted(part for part in own.code.keys() | right.code.keys() if own.code.get(part) != right.code.get(part))
        if not parts:
            continue
        more = f" and {len(parts) - _NAMED_AT_MOST} more" if len(parts) > _NAMED_AT_MOST else ""
        remedies = []
        # A module at the top of a path is a part without a package: elastictrain/train, my_task.py.
        for package in dict.fromkeys(part.partition("/")[0].removesuffix(".py") for part in parts):
            source, target = right.folders.get(package), own.folders.get(package)
            if source is None or target is None:
                remedies.append(f"install {package} on {host if target is None else right_host}, or remove it from the other")
                continue
            slash = "" if source.endswith(".py") else "/"
            copying = f"`rsync -a --delete {right_host}:{source}{slash} {target}{slash}`"
            pulling = f", or `git -C {Path(target).parent} pull`" if package in own.checkouts else ""
            remedies.append(copying + pulling)
        measured, remedy = f"other code: {', '.join(parts[:_NAMED_AT_MOST])}{more}", f"on {host}: {'; '.join(remedies)}"
        yield Reporter("alike", host).failed(measured, expected=f"as on {right_host}", remedy=remedy)


def _values(hosts: Mapping[str, SoftwareDigest]) -> Iterator[Verdict]:
    """Differences in versions, settings and devices, where a device of which nothing is known differs from nothing."""
    for kind, missing in (("versions", "none"), ("settings", "not set"), ("devices", "")):
        by_host: dict[str, Mapping[str, str]] = {one: getattr(likeness, kind) for one, likeness in hosts.items()}
        for name in sorted({name for its in by_host.values() for name in its if not OF_ONE_HOST.fullmatch(name)}):
            values = {one: value for one, its in by_host.items() if (value := its.get(name, missing))}
            right_host = _model(values)
            right = values[right_host]
            for host, mine in values.items():
                if mine == right:
                    continue
                # Of Python's version only the first two numbers matter: the third is for bug fixes.
                python = name == "python" and mine.split(".")[:2] != right.split(".")[:2]
                remedy = f"set {name} alike on all hosts, in the environment and in nccl.conf"
                if kind == "versions":
                    remedy = _installing(name, right, host)
                elif kind == "devices":
                    remedy = f"on {host}: {_MENDING.get(name, 'as root `nvidia-smi -rac`, and `nvidia-smi -rgc`')}"
                fatal, expected = name in MUST_MATCH or python, f"{name} {right} as on {right_host}"
                yield Reporter("alike", host).failed(f"{name} {mine}", fatal=fatal, expected=expected, remedy=remedy)


def _installing(package: str, right: str, host: str) -> str:
    build = right.partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build and package == "torch" else ""
    if package == "python":
        return f"use python {right} on {host}: `uv venv --python {right}` and install the packages again"
    return f"on {host}: `python -m pip {f'install {package}=={right}{index}' if right != 'none' else f'uninstall {package}'}`"
