"""What is read from `nvidia-smi`, one recording per generation of drivers and kind of GPU."""

from collections.abc import Callable

import pytest

from elastictrain.preflight.host.gpu import GpuReport, Trouble
from elastictrain.preflight.host.nvidia import parse_nvidia, read_nvidia
from elastictrain.surroundings import Surroundings, ToolOutput

Answered = Callable[..., ToolOutput]


def test_h100_under_550(answered: Answered) -> None:
    report = parse_nvidia(answered("nvidia_smi_550_h100.xml"))
    assert (report.driver, report.whole, report.trouble) == ("550.54.15", True, None)
    first, second = report.gpus
    assert (first.index, second.index, second.bus) == (0, 1, "0000:43:00.0")
    assert (first.name, first.width, first.max_width) == ("NVIDIA H100 80GB HBM3", 16, 16)
    assert (first.ecc_on, first.uncorrected, first.remap_pending, first.remap_failed, first.slowed) == (
        True,
        0,
        False,
        False,
        (),
    )
    assert (first.fabric_state, first.fabric_status, first.mig, first.recovery) == ("Completed", "Success", False, None)


def test_v100_counts_double_bits_and_retires_pages(answered: Answered) -> None:
    healthy, worn = parse_nvidia(answered("nvidia_smi_470_v100.xml")).gpus
    assert (healthy.uncorrected, healthy.remap_pending, healthy.remap_failed) == (0, False, None)
    assert (worn.uncorrected, worn.remap_pending) == (2, True)
    assert healthy.mig is None


def test_a100_under_525_has_throttle_reasons_by_their_old_name(answered: Answered) -> None:
    hot, failed = parse_nvidia(answered("nvidia_smi_525_a100.xml")).gpus
    assert hot.slowed == ("thermal (hardware)", "hardware slowdown")
    assert hot.temperature_c == 91
    assert (hot.fabric_state, hot.recovery) == (None, None)
    assert (failed.remap_failed, failed.recovery) == (True, "Reset")


def test_a100_divided_by_mig(answered: Answered) -> None:
    (gpu,) = parse_nvidia(answered("nvidia_smi_535_a100_mig.xml")).gpus
    assert (gpu.mig, gpu.remap_pending) == (True, None)


def test_h200_under_570(answered: Answered) -> None:
    good, bad = parse_nvidia(answered("nvidia_smi_570_h200.xml")).gpus
    assert (good.recovery, good.worn_out) == (None, False)
    assert (bad.uncorrected, bad.worn_out, bad.remap_pending, bad.recovery) == (3, True, True, "Drain and Reset")


def test_what_an_older_driver_recommends(recorded: Callable[[str], str]) -> None:
    text = recorded("nvidia_smi_525_a100.xml")
    assert "<reset_required>Yes" in text
    drains = text.replace("<reset_required>Yes", "<reset_required>No").replace(
        "<drain_and_reset_recommended>No", "<drain_and_reset_recommended>Yes"
    )
    assert {gpu.recovery for gpu in parse_nvidia(ToolOutput(0, drains, "")).gpus} == {"Drain and Reset"}


def test_gb200_in_another_pci_domain(answered: Answered) -> None:
    report = parse_nvidia(answered("nvidia_smi_580_gb200.xml"))
    assert [gpu.bus for gpu in report.gpus] == ["0008:01:00.0", "0009:01:00.0"]
    assert {gpu.fabric_state for gpu in report.gpus} == {"Completed"}


def test_a_consumer_card_counts_no_errors(answered: Answered) -> None:
    (gpu,) = parse_nvidia(answered("nvidia_smi_560_rtx4090.xml")).gpus
    assert (gpu.uncorrected, gpu.ecc_on, gpu.width, gpu.max_width) == (None, None, 8, 16)


def test_values_that_the_tool_does_not_know_are_unknown(answered: Answered) -> None:
    report = parse_nvidia(answered("nvidia_smi_garbled_values.xml"))
    (gpu,) = report.gpus
    assert report.driver is None
    unknown = (gpu.name, gpu.uuid, gpu.temperature_c, gpu.width, gpu.max_width, gpu.ecc_on, gpu.uncorrected)
    assert set(unknown) == {None}
    assert {gpu.remap_pending, gpu.remap_failed, gpu.slowed, gpu.mig, gpu.fabric_state, gpu.fabric_status} == {None}
    assert gpu.bus == "0000:5e:00.0"


def test_what_was_cut_off_is_left_out(recorded: Callable[[str], str]) -> None:
    text = recorded("nvidia_smi_550_h100.xml")
    report = parse_nvidia(ToolOutput(0, text[: text.index('id="00000000:43:00.0"') + 300], ""))
    assert [gpu.bus for gpu in report.gpus] == ["0000:1b:00.0"]
    assert not report.whole


def test_a_gpu_less_than_the_tool_counts_is_noticed(recorded: Callable[[str], str]) -> None:
    text = recorded("nvidia_smi_550_h100.xml").replace("<attached_gpus>2", "<attached_gpus>3")
    assert not parse_nvidia(ToolOutput(0, text, "")).whole


def test_warnings_around_the_answer_do_no_harm(recorded: Callable[[str], str]) -> None:
    text = recorded("nvidia_smi_550_h100.xml")
    report = parse_nvidia(ToolOutput(0, f"a word before\n{text}WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n", ""))
    assert len(report.gpus) == 2
    assert report.whole


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("nvidia_smi_mismatch.txt", Trouble.MISMATCH),
        ("nvidia_smi_no_driver.txt", Trouble.NO_DRIVER),
        ("nvidia_smi_no_devices.txt", Trouble.NO_DEVICES),
        ("topo_h100.txt", Trouble.GARBLED),
    ],
)
def test_trouble_is_told_apart(name: str, trouble: Trouble, answered: Answered) -> None:
    report = parse_nvidia(answered(name, returncode=9))
    assert (report.trouble, report.gpus) == (trouble, ())
    assert report.detail


def test_a_hanging_tool() -> None:
    assert parse_nvidia(ToolOutput(-1, "", "", timed_out=True)).trouble is Trouble.NO_ANSWER


@pytest.mark.parametrize(
    ("name", "bus"), [("nvidia_smi_lost.txt", "0000:3b:00.0"), ("nvidia_smi_lost_575.txt", "0000:34:00.0")]
)
def test_a_lost_gpu_is_named(name: str, bus: str, answered: Answered) -> None:
    report = parse_nvidia(answered(name, returncode=15))
    assert (report.lost, report.trouble) == ((bus,), None)


def test_a_lost_gpu_without_an_address_is_named_by_its_index() -> None:
    said = "Unable to determine the device handle for GPU1: Unknown Error\n"
    assert parse_nvidia(ToolOutput(255, "", said)).lost == ("1",)


def test_the_others_are_listed_when_one_is_lost(host: Callable[..., Surroundings], answered: Answered) -> None:
    tools = {
        "nvidia-smi -q -x": answered("nvidia_smi_lost.txt"),
        "nvidia-smi --query-gpu": answered("nvidia_smi_lost_list.csv"),
    }
    report = read_nvidia(host(tools=tools))
    assert isinstance(report, GpuReport)
    assert [(gpu.index, gpu.bus) for gpu in report.gpus] == [(0, "0000:1b:00.0"), (2, "0000:43:00.0")]
    assert (report.lost, report.driver, report.whole) == (("0000:3b:00.0",), "535.161.08", False)


def test_no_tool(host: Callable[..., Surroundings]) -> None:
    assert read_nvidia(host()) is None
