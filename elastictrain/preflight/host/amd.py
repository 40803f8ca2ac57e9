"""Reads AMD GPUs: `rocm-smi` for which there are, `amd-smi` and the driver's files in sysfs for their health."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Trouble, Vendor, bus_id, decimal, integer, link_widths, word
from elastictrain.preflight.verdict import Reporter, Status, Verdict
from elastictrain.surroundings import Surroundings

LIMIT_S = 15.0
_SHOWN = ("productname", "uniqueid", "bus", "temp", "topotype", "driverversion")
_ROCM = ("rocm-smi", *(f"--show{one}" for one in _SHOWN), "--json")
_AMD = ("amd-smi", "metric", "--ecc", "--power", "--temperature", "--json")
_CARD = re.compile(r"card(\d{1,3})")
_LINK = re.compile(r"Link type between DRM devices (\d{1,3}) and (\d{1,3})")
_SLOWED = {"THROTTLED": ("throttled",), "UNTHROTTLED": ()}
_UNCORRECTED = re.compile(r"^ue:\s*(\d{1,18})", re.M)


def read_amd(surroundings: Surroundings) -> tuple[GpuReport, Mapping[tuple[int, int], str]] | None:
    """AMD GPUs of this host and their links; None without `rocm-smi`."""
    answer = surroundings.tools.run(_ROCM, limit_s=LIMIT_S)
    if answer is None:
        return None
    if answer.timed_out:
        return GpuReport(vendor=Vendor.AMD, tool="rocm-smi", trouble=Trouble.NO_ANSWER, whole=False), {}
    report, links = parse_rocm_smi(answer.stdout, answer.stderr)
    if not report.gpus:
        return report, links
    metrics = parse_amd_smi(surroundings.ask(*_AMD, limit_s=LIMIT_S))
    return replace(report, gpus=tuple(_complete(surroundings, gpu, metrics.get(gpu.index, {})) for gpu in report.gpus)), links


def parse_rocm_smi(text: str, errors: str = "") -> tuple[GpuReport, Mapping[tuple[int, int], str]]:
    """GPUs, driver and links of `rocm-smi ... --json`, whose keys changed their case between ROCm 5 and 6."""
    # Warnings precede the JSON, on standard output, too.
    data = _json(text)
    gpus: list[Gpu] = []
    links: dict[tuple[int, int], str] = {}
    driver = None
    for name, fields in data.items() if isinstance(data, dict) else ():
        if not isinstance(fields, dict):
            continue
        values = {str(key).lower().rstrip(":").strip(): str(value) for key, value in fields.items()}
        if card := _CARD.fullmatch(str(name)):
            heat = [decimal(value) for key, value in values.items() if key.startswith("temperature (sensor")]
            gpus.append(Gpu(
                index=int(card[1]),
                bus=bus_id(values.get("pci bus")),
                name=word(values.get("card series")) or word(values.get("card model")),
                uuid=word(values.get("unique id")),
                temperature_c=max((degrees for degrees in heat if degrees is not None), default=None),
            ))  # fmt: skip
        elif name == "system":
            driver = word(values.get("driver version"))
            for key, value in fields.items():
                if (pair := _LINK.search(str(key))) and isinstance(value, str) and word(value):
                    links[int(pair[1]), int(pair[2])] = value.strip()
    gpus.sort(key=lambda gpu: gpu.index)
    report = GpuReport(vendor=Vendor.AMD, tool="rocm-smi", driver=driver, gpus=tuple(gpus), whole=bool(gpus))
    if not gpus:
        said = f"{errors}\n{text}".strip()
        trouble = Trouble.told(said) if said else Trouble.NO_DEVICES
        report = replace(report, trouble=trouble, detail=said.partition("\n")[0].strip()[:200])
    return report, links


def parse_amd_smi(text: str) -> Mapping[int, Mapping[str, Any]]:
    """Known fields of each GPU, from `amd-smi metric --json`: a list up to ROCm 6, an object around it from ROCm 7 on."""
    data = _json(text)
    rows = data.get("gpu_data") if isinstance(data, dict) else data
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict) or not isinstance(row.get("gpu"), int):
            continue
        ecc, power, heat = (part if isinstance(part := row.get(key), dict) else {} for key in ("ecc", "power", "temperature"))
        degrees = [heat.get(key) for key in ("hotspot", "mem", "edge")]
        # A figure, or an object with its value and unit.
        texts = [str(one.get("value") if isinstance(one, dict) else one) for one in degrees]
        fields = {
            "uncorrected": integer(str(ecc.get("total_uncorrectable_count", ""))),
            "temperature_c": max((one for one in map(decimal, texts) if one is not None), default=None),
            "slowed": _SLOWED.get(str(power.get("throttle_status", "")).strip().upper()),
        }
        found[row["gpu"]] = {name: value for name, value in fields.items() if value is not None}
    return found


def judge_xgmi(links: Mapping[tuple[int, int], str], *, host: str) -> list[Verdict]:
    """Pairs of GPUs that use PCIe while others of the host have XGMI. Reported as check `nvlink`."""
    verdict, kinds = Reporter("nvlink", host), {pair: kind.upper() for pair, kind in links.items()}
    if not kinds:
        return [verdict.skipped("unknown", remedy="look yourself: rocm-smi --showtopotype")]
    if "XGMI" not in kinds.values():
        return [verdict.passed("no XGMI in use")]
    remedy = "look: rocm-smi --showtopo; rocm-smi --showxgmierr; dmesg | grep -i xgmi; then reboot the host"
    others = ((pair, kind) for pair, kind in kinds.items() if kind != "XGMI")
    found = [verdict(f"GPU {one} -> GPU {two} on {host}", Status.WARN, kind, "XGMI", remedy) for (one, two), kind in others]
    return found or [verdict.passed("XGMI between all GPUs")]


def _complete(surroundings: Surroundings, gpu: Gpu, metrics: Mapping[str, Any]) -> Gpu:
    """Add the figures of `amd-smi`, or else the driver's own error counts in sysfs."""
    gpu = replace(gpu, **metrics)
    if gpu.bus:
        device = f"/sys/bus/pci/devices/{gpu.bus}"
        width, max_width = link_widths(surroundings, device)
        gpu = replace(gpu, width=width, max_width=max_width)
        if gpu.uncorrected is None:
            names = [name for name in surroundings.names(f"{device}/ras") if name.endswith("_err_count")]
            texts = [surroundings.read(f"{device}/ras/{name}") or "" for name in names]
            counts = [int(found[1]) for text in texts if (found := _UNCORRECTED.search(text))]
            gpu = replace(gpu, uncorrected=sum(counts) if counts else None)
    return replace(gpu, ecc_on=True if gpu.uncorrected is not None else None)


def _json(text: str) -> object:
    starts: Sequence[int] = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    for start in sorted(starts):
        try:
            data: object = json.JSONDecoder().raw_decode(text[start:])[0]
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict | list):
            return data
    return None
