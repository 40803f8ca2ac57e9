from collections.abc import Callable

from elastictrain.preflight.host.amd import judge_xgmi, parse_amd_smi, parse_rocm_smi, read_amd
from elastictrain.preflight.host.gpu import Trouble
from elastictrain.preflight.verdict import Status
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.made import gpu_pair

Recorded = Callable[[str], str]


def test_rocm_5_with_a_warning_before_the_answer(recorded: Recorded) -> None:
    report, links = parse_rocm_smi(recorded("rocm_smi_5.json"))
    assert [(gpu.index, gpu.bus, gpu.name, gpu.temperature_c) for gpu in report.gpus] == [
        (0, "0000:83:00.0", "AMD Instinct MI250X", 55),
        (1, "0000:84:00.0", "AMD Instinct MI250X", 56),
    ]
    assert (report.driver, links) == ("6.3.6", {(0, 1): "XGMI"})


def test_rocm_6_writes_names_otherwise(recorded: Recorded) -> None:
    report, links = parse_rocm_smi(recorded("rocm_smi_6.json"))
    assert {gpu.name for gpu in report.gpus} == {"AMD Instinct MI250X"}
    (found,) = judge_xgmi(links, host="h1")
    assert (found.status, found.subject) == (Status.WARN, gpu_pair(1, 2))


def test_xgmi_between_all_none_or_unknown() -> None:
    assert judge_xgmi({(0, 1): "XGMI"}, host="h1")[0].status is Status.PASS
    assert judge_xgmi({(0, 1): "PCIE"}, host="h1")[0].status is Status.PASS
    assert judge_xgmi({}, host="h1")[0].status is Status.SKIP


def test_no_driver_no_gpu_and_nonsense(recorded: Recorded) -> None:
    assert parse_rocm_smi("", recorded("rocm_smi_no_driver.txt"))[0].trouble is Trouble.NO_DRIVER
    assert parse_rocm_smi("")[0].trouble is Trouble.NO_DEVICES
    assert parse_rocm_smi("{broken")[0].trouble is Trouble.GARBLED
    assert parse_rocm_smi('{"card0": 7, "x": []}')[0].gpus == ()


def test_metrics_of_both_shapes(recorded: Recorded) -> None:
    old = parse_amd_smi(recorded("amd_smi_6.json"))
    assert old[0] == {"uncorrected": 0, "slowed": (), "temperature_c": 50}
    assert (old[1]["uncorrected"], old[1]["slowed"]) == (3, ("throttled",))
    new = parse_amd_smi(recorded("amd_smi_7.json"))
    assert "slowed" not in new[0]
    assert ("uncorrected" in new[1], new[1]["slowed"]) == (False, ())


def test_a_host_is_put_together_from_all_sources(
    host: Callable[..., Surroundings], answered: Callable[..., ToolOutput]
) -> None:
    device = "/sys/bus/pci/devices/0000:83:00.0"
    files = {
        f"{device}/current_link_width": "8",
        f"{device}/max_link_width": "16",
        f"{device}/ras/umc_err_count": "ue: 2\nce: 5\n",
        f"{device}/ras/gfx_err_count": "ue: 1\nce: 0\n",
        f"{device}/ras/features": "feature mask: 0x5",
    }
    answer = read_amd(host(files, {"rocm-smi": answered("rocm_smi_5.json")}))
    assert answer is not None
    first, second = answer[0].gpus
    assert (first.width, first.max_width, first.uncorrected, first.slowed) == (8, 16, 3, None)
    assert (second.width, second.uncorrected) == (None, None)
    answer = read_amd(host(files, {"rocm-smi": answered("rocm_smi_5.json"), "amd-smi metric": answered("amd_smi_6.json")}))
    assert answer is not None
    assert [(gpu.uncorrected, gpu.slowed, gpu.temperature_c) for gpu in answer[0].gpus] == [
        (0, (), 50),
        (3, ("throttled",), 101),
    ]


def test_no_tool_and_a_hanging_one(host: Callable[..., Surroundings]) -> None:
    assert read_amd(host()) is None
    answer = read_amd(host(tools={"rocm-smi": ToolOutput(-1, "", "", timed_out=True)}))
    assert answer is not None
    assert answer[0].trouble is Trouble.NO_ANSWER
