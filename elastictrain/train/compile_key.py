"""The name under which compiled code is kept: a digest of all that decides whether another process can use it.

torch looks each graph up by its own keys (graph, shapes, torch, device). They leave out what the shared objects that g++ made
depend on: the processor, the C library, the Python.
"""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from elastictrain.config.composed import RunConfig
from elastictrain.config.digest import to_tree
from elastictrain.version import __version__

KEY_DIGITS = 24

# Both spellings, of x86 and of ARM; other lines change with the load, or with each core.
_PROCESSOR = frozenset(
    (
        *("vendor_id", "cpu family", "model", "model name", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    )
)
_SHAPING = frozenset({"micro_batch", "seq_len", "precision", "fp8_scaling", "compile", "activation_checkpointing"})


def cache_key(facts: object) -> str:
    """24 hex digits; equal for equal facts (plain values). Pure."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def facts_of(config: RunConfig, *, task: object, device: torch.device) -> dict[str, object]:
    """All that compiled code depends on, as plain values: this host, its device, the task's code, and the keys that shape a
    graph. Not the world size: the graphs of a block are the same in every world."""
    tree = to_tree(config)
    train, run = config.train, config.run
    return {
        "host": host_facts(Path("/proc/cpuinfo"), Path("/etc/os-release")),
        "device": device_facts(device),
        "code": code_digest(sys.modules.get(type(task).__module__)),
        "task": tree["task"],
        "train": {name: getattr(train, name) for name in sorted(_SHAPING)},
        "run": [run.deterministic, run.num_threads],
        "parallel": config.parallel.kind,
    }


def host_facts(processor: Path, system: Path) -> dict[str, str]:
    """What shared objects depend on. `processor` is /proc/cpuinfo, `system` /etc/os-release."""
    c_library, found = "", {"triton": "", "torchao": ""}
    with suppress(ValueError, OSError):
        c_library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "elastictrain": __version__,
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.version.cuda} {torch.version.hip}",
        **found,
        "python": f"{sys.version} {sysconfig.get_config_var('SOABI')}",
        "machine": platform.machine(),
        "c_library": c_library,
        "system": _text(system),
        "processor": processor_of(_text(processor)),
    }


def processor_of(text: str) -> str:
    """Model and features of the first processor in the text of /proc/cpuinfo. Pure."""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return "\n".join(f"{name.strip()}={value.strip()}" for name, _, value in pairs if name.strip() in _PROCESSOR)


def device_facts(device: torch.device) -> str:
    """Kind of the device; its index does not count, since a host keeps the code for all its devices together."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    # A slice of a GPU has the name of the whole one, but fewer processors, by which kernels are tuned.
    return f"{found.name} {found.major}.{found.minor} {found.multi_processor_count}"


def code_digest(module: object) -> str:
    """SHA-256 of the task's module, and of the other modules in the same folder if that is a package; empty if it has no
    source. Other code changes the graph, which torch's own keys notice."""
    name = getattr(module, "__file__", None)
    if name is None:
        return ""
    path = Path(name)
    files = sorted(path.parent.glob("*.py")) if (path.parent / "__init__.py").exists() else [path]
    digest = hashlib.sha256()
    for file in files:
        # Names without folders: the package may be installed elsewhere on another host.
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(_text(file).encode()).digest())
    return digest.hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
