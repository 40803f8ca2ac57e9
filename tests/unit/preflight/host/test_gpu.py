from collections.abc import Callable

import pytest

from elastictrain.preflight.host.gpu import (
    Gpu,
    GpuReport,
    Vendor,
    bus_id,
    decimal,
    integer,
    judge_ecc,
    judge_row_remap,
    judge_throttle,
    truth,
    word,
)
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import ToolOutput
from tests.unit.preflight.made import gpu

Judge = Callable[..., list[Verdict]]


def report(*gpus: Gpu, vendor: Vendor = Vendor.NVIDIA) -> GpuReport:
    return GpuReport(vendor=vendor, tool="nvidia-smi", gpus=gpus)


@pytest.mark.parametrize(
    ("judge", "good", "bad", "status"),
    [
        (judge_ecc, Gpu(index=0, uncorrected=0), Gpu(index=0, uncorrected=2, bus="0000:3b:00.0"), Status.FAIL),
        (judge_ecc, Gpu(index=0, uncorrected=0, worn_out=False), Gpu(index=0, uncorrected=0, worn_out=True), Status.FAIL),
        (judge_row_remap, Gpu(index=0, remap_pending=False), Gpu(index=0, remap_pending=True), Status.WARN),
        (judge_row_remap, Gpu(index=0, remap_failed=False), Gpu(index=0, remap_failed=True), Status.FAIL),
        (judge_throttle, Gpu(index=0, slowed=()), Gpu(index=0, slowed=("thermal (hardware)",), temperature_c=93), Status.WARN),
    ],
)
def test_good_bad_and_unknown(judge: Judge, good: Gpu, bad: Gpu, status: Status) -> None:
    (passed,) = judge(report(good), host="h1")
    assert (passed.status, passed.subject) == (Status.PASS, "h1")
    (found,) = judge(report(bad), host="h1")
    assert (found.status, found.subject) == (status, gpu(0))
    (skipped,) = judge(report(Gpu(index=0)), host="h1")
    assert skipped.status is Status.SKIP
    assert judge(report(), host="h1") == []


def test_the_remedy_names_the_gpu_and_the_vendors_tool() -> None:
    (nvidia,) = judge_ecc(report(Gpu(index=3, uncorrected=1, bus="0000:3b:00.0")), host="h1")
    assert all(word in nvidia.remedy for word in ("nvidia-smi", "--gpu-reset", "0000:3b:00.0"))
    (amd,) = judge_ecc(report(Gpu(index=3, uncorrected=1, bus="0000:3b:00.0"), vendor=Vendor.AMD), host="h1")
    assert "amd-smi reset" in amd.remedy


def test_one_gpu_without_ecc_among_others() -> None:
    (found,) = judge_ecc(report(Gpu(index=0, ecc_on=True, uncorrected=0), Gpu(index=1, ecc_on=False)), host="h1")
    assert (found.status, found.subject) == (Status.WARN, gpu(1))
    (off,) = judge_ecc(report(Gpu(index=0, ecc_on=False)), host="h1")
    assert (off.status, str(off.measured).split()[-1]) == (Status.SKIP, "off")


def test_a_power_brake_is_not_a_matter_of_fans() -> None:
    (found,) = judge_throttle(report(Gpu(index=0, slowed=("power brake", "hardware slowdown"))), host="h1")
    assert "power supplies" in found.remedy


def test_a_recorded_host(answered: Callable[..., ToolOutput]) -> None:
    facts = parse_nvidia(answered("nvidia_smi_570_h200.xml"))
    assert [(v.subject, v.status) for v in judge_ecc(facts, host="h1")] == [(gpu(1), Status.FAIL)]
    assert [(v.subject, v.status) for v in judge_row_remap(facts, host="h1")] == [(gpu(1), Status.WARN)]
    assert [v.status for v in judge_throttle(facts, host="h1")] == [Status.PASS]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16x", 16),
        ("27 C", 27),
        ("26.562 GB/s", 26.562),
        (" 0 ", 0),
        ("-5 C", -5),
        ("N/A", None),
        ("[Unknown Error]", None),
        ("ERR!", None),
        ("", None),
        (None, None),
        ("1.2.3", None),
        ("535.54.03", None),
    ],
)
def test_numbers(text: str | None, number: float | None) -> None:
    assert decimal(text) == number


def test_a_fraction_is_no_whole_number() -> None:
    assert integer("1.5") is None
    assert integer("8x") == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [("Yes", True), ("Not Active", False), ("Enabled", True), ("[N/A]", None), ("Unknown Error", None), (None, None)],
)
def test_truths(text: str | None, value: bool | None) -> None:
    assert truth(text) is value


@pytest.mark.parametrize(
    "text", ["N/A", "[N/A]", "ERR!", "None", "", "Requested functionality has been deprecated", "[Unknown Error]"]
)
def test_words_that_say_nothing(text: str) -> None:
    assert word(text) is None


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        ("GPU0000:CB:00.0: Unknown Error", "0000:cb:00.0"),
        ("GPU1", None),
        ("PCI:0000:9b:00", "0000:9b:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("GPU1: 0000:34:00.0: GPU is lost", "0000:34:00.0"),
        ("nothing", None),
    ],
)
def test_addresses(text: str, bus: str | None) -> None:
    assert bus_id(text) == bus
