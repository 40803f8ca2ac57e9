"""Reads GPUs from `nvidia-smi -q -x`. With `--query-gpu` one unknown field makes the query fail as a whole, and fields were
renamed between generations (throttle reasons became event reasons); in the XML such a field is N/A or missing. The XML also has
MIG instances, fabric state and recovery action. It costs about 100 KB per GPU."""

import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree as ET

from elastictrain.preflight.host.gpu import Gpu, GpuReport, Trouble, Vendor, bus_id, decimal, integer, truth, word
from elastictrain.surroundings import Surroundings, ToolOutput

LIMIT_S = 20.0  # one call; without persistence mode it wakes the GPUs, a second or two per GPU on large hosts
TOOL = "nvidia-smi"
# Fields that every driver knows, for when a lost GPU prevents the full answer.
_LIST = (TOOL, "--query-gpu=index,pci.bus_id,uuid,driver_version,name", "--format=csv,noheader")
_LOST = re.compile(r"unable to determine the device handle for gpu\s*(?P<which>[^\n]*)", re.I)
_LOST_INDEX = re.compile(r"\s*(\d{1,3})\b")
_SLOWED = {
    "hw_thermal_slowdown": "thermal (hardware)",
    "sw_thermal_slowdown": "thermal (software)",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
}
_TRAITS = {
    "product_name": "model",
    "ecc_mode/current_ecc": "ECC",
    "mig_mode/current_mig": "MIG",
    "persistence_mode": "persistence",
    "gpu_power_readings/current_power_limit": "power limit",
    "power_readings/current_power_limit": "power limit",  # before driver 535
    "applications_clocks/graphics_clock": "application clock",
    "max_clocks/graphics_clock": "maximal clock",
}


def read_nvidia(surroundings: Surroundings) -> GpuReport | None:
    """NVIDIA GPUs of this host; None without `nvidia-smi`."""
    answer = surroundings.tools.run((TOOL, "-q", "-x"), limit_s=LIMIT_S)
    if answer is None:
        return None
    report = parse_nvidia(answer)
    if report.lost and not report.gpus:
        gpus, driver = parse_list(surroundings.ask(*_LIST, limit_s=LIMIT_S))
        return replace(report, driver=driver or report.driver, gpus=gpus, whole=False)
    return report


def parse_nvidia(answer: ToolOutput) -> GpuReport:
    """Parse the answer to `nvidia-smi -q -x`. Never raises: a GPU whose element is incomplete is left out."""
    if answer.timed_out:
        return GpuReport(vendor=Vendor.NVIDIA, tool=TOOL, trouble=Trouble.NO_ANSWER, whole=False)
    said = f"{answer.stdout}\n{answer.stderr}"
    lost: dict[str, None] = {}
    for complaint in _LOST.finditer(said):
        # Names a GPU by PCI address, by index, or by other text.
        which = complaint["which"]
        index = _LOST_INDEX.match(which)
        lost[bus_id(which) or (index[1] if index else which.strip(" :")) or "unknown"] = None
    gpus: list[Gpu] = []
    texts: dict[str, str | None] = {}
    whole = False
    for element in _elements(answer.stdout):
        if element.tag == "gpu":
            gpus.append(_gpu(len(gpus), element))
            element.clear()
        elif element.tag in {"driver_version", "attached_gpus"}:
            texts.setdefault(element.tag, word(element.text))
        whole = element.tag == "nvidia_smi_log"
    attached = integer(texts.get("attached_gpus"))
    trouble = None
    if not gpus and not lost:
        trouble = Trouble.NO_DEVICES if whole and attached == 0 else Trouble.told(said)
    return GpuReport(
        vendor=Vendor.NVIDIA,
        tool=TOOL,
        trouble=trouble,
        detail=said.strip().partition("\n")[0].strip()[:200] if trouble or lost else "",
        driver=_version(texts.get("driver_version")),
        gpus=tuple(gpus),
        lost=tuple(lost),
        whole=whole and attached in {None, len(gpus)},
    )


def parse_list(text: str) -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs of the short listing, and the driver's version."""
    gpus, driver = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 4)]
        if len(cells) == 5 and (index := integer(cells[0])) is not None and (bus := bus_id(cells[1])):
            gpus.append(Gpu(index=index, bus=bus, uuid=word(cells[2]), name=word(cells[4])))
            driver = driver or _version(cells[3])
    return tuple(gpus), driver


def _elements(text: str) -> Iterator[ET.Element]:
    """Elements in the order of their ends, as far as the text is XML; warnings may precede and follow it."""
    starts = [at for at in (text.find("<?xml"), text.find("<nvidia_smi_log")) if at >= 0]
    if not starts:
        return
    parser: ET.XMLPullParser[ET.Element] = ET.XMLPullParser(["end"])
    try:
        parser.feed(text[min(starts) :])
        for event in parser.read_events():
            if isinstance(event[-1], ET.Element):
                yield event[-1]
    except (ET.ParseError, ValueError):
        return


def _gpu(index: int, element: ET.Element) -> Gpu:
    text = element.findtext
    remap_pending = truth(text("remapped_rows/remapped_row_pending"))
    if remap_pending is None:
        # GPUs before Ampere retire pages instead of remapping rows.
        remap_pending = truth(text("retired_pages/pending_retirement"))
    # Drivers have counted errors in three ways.
    counts = [integer(text("ecc_errors/volatile/double_bit/total"))]
    if counts == [None]:
        counts = [integer(one.text) for one in element.iterfind("ecc_errors/volatile/*") if "uncorrectable" in one.tag]
    known = [count for count in counts if count is not None]
    slowed = None
    for kind in ("throttle", "event"):
        texts = {name: text(f"clocks_{kind}_reasons/clocks_{kind}_reason_{key}") for key, name in _SLOWED.items()}
        states = {name: truth(state) for name, state in texts.items()}
        if any(state is not None for state in states.values()):
            slowed = tuple(name for name, state in states.items() if state)
    recovery = word(text("gpu_recovery_action"))
    for wanted, name in (("drain_and_reset_recommended", "Drain and Reset"), ("reset_required", "Reset")):
        recovery = name if truth(text(f"gpu_reset_status/{wanted}")) else recovery
    return Gpu(
        index=index,
        bus=bus_id(element.get("id")) or bus_id(text("pci/pci_bus_id")),
        name=word(text("product_name")),
        uuid=word(text("uuid")),
        temperature_c=decimal(text("temperature/gpu_temp")),
        width=integer(text("pci/pci_gpu_link_info/link_widths/current_link_width")),
        max_width=integer(text("pci/pci_gpu_link_info/link_widths/max_link_width")),
        generation=integer(text("pci/pci_gpu_link_info/pcie_gen/current_link_gen")),
        max_generation=integer(text("pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        replays=integer(text("pci/replay_counter")),
        ecc_on=truth(text("ecc_mode/current_ecc")),
        uncorrected=sum(known) if known else None,
        worn_out=truth(text("ecc_errors/aggregate/sram_threshold_exceeded")),
        remap_pending=remap_pending,
        remap_failed=truth(text("remapped_rows/remapped_row_failure")),
        slowed=slowed,
        mig=truth(text("mig_mode/current_mig")),
        fabric_state=word(text("fabric/state")),
        fabric_status=word(text("fabric/status")),
        recovery=recovery,
        traits=tuple((name, value) for path, name in _TRAITS.items() if (value := word(text(path)))),
    )


def _version(text: str | None) -> str | None:
    return text if text and re.fullmatch(r"\d+(\.\d+){1,3}", text) else None
