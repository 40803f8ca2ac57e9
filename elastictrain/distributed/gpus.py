"""The GPUs of this host, and why the installed torch cannot use them. Imports no torch, since a launcher uses it, too."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDES_ALL = ("", "-1", "NoDevFiles")
_FILES = ("nvidia[0-9]*", "nvhost-gpu", "dxg", "kfd")  # NVIDIA, its boards with shared memory, Windows, AMD
_DRIVER = re.compile(r"Kernel Module(?: for \S+)? +(\S+)")
_BUILT_FOR = re.compile(r"^(cuda|hip)\b[^=]*= '([0-9.]+)", re.MULTILINE)
_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPU facts of a host; an empty text is absent or unknown."""

    files: tuple[str, ...] = ()  # devices that the kernel shows, like /dev/nvidia0
    driver: str = ""  # version of the NVIDIA driver in the kernel
    driver_cuda: str = ""  # newest CUDA that the driver's library supports
    mask: str = ""  # `NAME=value` of the variable that hides GPUs
    all_hidden: bool = False
    torch: str = ""  # version of the installed torch
    torch_cuda: str = ""  # CUDA that it is built for
    torch_hip: str = ""


def read_gpus(environment: Mapping[str, str], *, root: Path = Path("/")) -> Gpus:
    """Read the GPU facts from the kernel, the driver and the files of torch."""
    shown = [path for pattern in _FILES for path in sorted((root / "dev").glob(pattern))]
    masks = sorted((environment[name] not in _HIDES_ALL, name) for name in _MASKS if name in environment)
    spec = find_spec("torch")
    text = _text(Path(spec.origin).with_name("version.py")) if spec is not None and spec.origin else ""
    built_for = dict(_BUILT_FOR.findall(text))
    driver, version = _DRIVER.search(_text(root / "proc/driver/nvidia/version")), _VERSION.search(text)
    return Gpus(
        files=tuple(f"/dev/{path.name}" for path in shown),
        driver=driver[1] if driver else "",
        driver_cuda=_cuda_of_driver() if driver else "",
        mask=f"{masks[0][1]}={environment[masks[0][1]]}" if masks else "",
        all_hidden=bool(masks) and not masks[0][0],
        torch=version[1] if version else "",
        torch_cuda=built_for.get("cuda", ""),
        torch_hip=built_for.get("hip", ""),
    )


def why_no_gpu(gpus: Gpus, *, error: str = "") -> str:
    """Why torch can use no GPU here, and the remedy; empty if nothing is wrong. `error`: torch's own message."""
    shown = ", ".join(gpus.files)
    if gpus.all_hidden:
        return f"{gpus.mask} hides all GPUs from this process: unset it"
    if not gpus.files:
        return "this host has none (no /dev/nvidia0, no /dev/kfd): take one that has, or start the container with its GPUs"
    if not (gpus.torch_cuda or gpus.torch_hip):
        return f"torch {gpus.torch} is built for the CPU, though this host has {shown}: install a build for its GPUs"
    # Some sandboxes hide a driver that works.
    if error and gpus.files[0].startswith("/dev/nvidia") and not gpus.driver:
        return f"the NVIDIA driver is not loaded, though this host has {shown}: as root, modprobe nvidia"
    if (
        gpus.driver_cuda
        and gpus.torch_cuda
        and int(gpus.driver_cuda.partition(".")[0]) < int(gpus.torch_cuda.partition(".")[0])
    ):
        return (
            f"torch {gpus.torch} is built for CUDA {gpus.torch_cuda}, but the driver {gpus.driver} knows CUDA"
            f" {gpus.driver_cuda} at most: update the driver, or install a torch for an older CUDA"
        )
    if not error:
        return ""
    if gpus.mask:
        return f"{gpus.mask} is set, and torch says: {error}; unset it, or let it name some of {shown}"
    build = f"CUDA {gpus.torch_cuda}" if gpus.torch_cuda else f"ROCm {gpus.torch_hip}"
    return (
        f"torch {gpus.torch} for {build} and the driver {gpus.driver} of {shown} do not work together, torch says: {error};"
        " reboot if the driver was updated just now, or start the container anew"
    )


def needs_gpu(setting: str, reason: str) -> str:
    """The message where a `setting` requires a GPU and `why_no_gpu` has a reason."""
    return f"{setting} needs a GPU, and none can be used: {reason}; parallel.backend=gloo parallel.device=auto uses the CPU"


def _cuda_of_driver() -> str:
    """Query the driver's library, without starting a device."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return "" if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
