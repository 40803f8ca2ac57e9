import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.preflight.host.counters import (
    PortCounters,
    counters_path,
    growth,
    judge_counters,
    load,
    read_counters,
    store,
)
from elastictrain.preflight.host.nvidia import parse_nvidia
from elastictrain.preflight.host.nvlink import parse_errors
from elastictrain.preflight.verdict import Status
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.made import port

PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def reading(hours: float = 0.0, *, boot: str = "a", uptime_h: float = 100.0, **ports: dict[str, int]) -> PortCounters:
    return PortCounters(boot, 3600 * hours, 3600 * uptime_h, ports)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": "' + b"x" * (1 << 20) + b'"}'])
def test_what_cannot_be_understood_is_unknown(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(data)
    assert load(path) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    path, target = tmp_path / "kept.json", tmp_path / "target"
    store(target, reading(1.0))
    kept = target.read_text()
    path.symlink_to(target)
    assert load(path) is None
    store(path, reading(2.0))
    assert target.read_text() == kept
    assert not path.is_symlink()
    assert load(path) == reading(2.0)


def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kept.json")
    assert load(tmp_path / "kept.json") is None


def test_a_file_of_somebody_else_is_believed_only_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shared" / "kept.json"
    store(path, reading(1.0))
    path.parent.chmod(0o1777)
    assert load(path) == reading(1.0)
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    assert load(path) is None
    path.parent.chmod(0o755)
    assert load(path) == reading(1.0)


def test_nothing_remains_of_what_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        store(path, reading(1.0))
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_read(host: Callable[..., Surroundings]) -> None:
    files = {
        f"{PORT}/counters/link_downed": "3\n",
        f"{PORT}/counters/symbol_error": "65535",
        f"{PORT}/counters/port_rcv_errors": "N/A (no PMA)",
        f"{PORT}/hw_counters/local_ack_timeout_err": "12",
        "/sys/class/net/eth0/device/vendor": "0x15b3",
        "/sys/class/net/eth0/carrier_changes": "2",
        "/sys/class/net/eth0/statistics/rx_errors": "0",
        "/sys/class/net/wlan0/device/vendor": "0x8086",
        "/sys/class/net/wlan0/wireless/x": "",
        "/sys/class/net/wlan0/carrier_changes": "44",
        "/sys/class/net/veth1/carrier_changes": "9",
        "/proc/sys/kernel/random/boot_id": "b-1\n",
        "/proc/uptime": "7200.5 100.0\n",
    }
    found = read_counters(host(files), now=5.0)
    assert found == PortCounters(
        "b-1",
        5.0,
        7200.5,
        {
            "mlx5_0/1": {"link_downed": 3, "symbol_error": 65535, "local_ack_timeout_err": 12},
            "eth0": {"carrier_changes": 2, "rx_errors": 0},
        },
    )


def test_growth_is_what_came_since() -> None:
    grown = growth(
        reading(eth0={"rx_errors": 5, "carrier_changes": 2}), reading(2.0, eth0={"rx_errors": 9, "carrier_changes": 2})
    )
    assert grown == (2.0, {"eth0": {"rx_errors": 4, "carrier_changes": 0}})


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    grown = growth(reading(eth0={"rx_errors": 500}), reading(1.0, eth0={"rx_errors": 7}))
    assert grown == (1.0, {"eth0": {"rx_errors": 7}})


def test_after_a_boot_the_time_since_boot_counts() -> None:
    before = reading(eth0={"rx_errors": 5, "carrier_changes": 8})
    grown = growth(before, reading(50.0, boot="b", uptime_h=3.0, eth0={"rx_errors": 9, "carrier_changes": 2}))
    # The first coming up of a port is no outage.
    assert grown == (3.0, {"eth0": {"rx_errors": 9, "carrier_changes": 0}})


def test_ports_that_are_new_or_gone() -> None:
    before = reading(eth0={"rx_errors": 0}, eth1={"rx_errors": 0})
    after = reading(1.0, eth0={"rx_errors": 0}, eth2={"rx_errors": 9})
    assert set(growth(before, after)[1]) == {"eth0"}
    (found,) = judge_counters(before, after, host="h1")
    assert (found.status, found.subject) == (Status.WARN, port("eth1"))
    assert [found.subject for found in judge_counters(before, reading(1.0), host="h1")] == [port("eth0"), port("eth1")]


@pytest.mark.parametrize(
    ("counters", "hours", "status", "measured"),
    [
        ({"carrier_changes": 0, "rx_errors": 0}, 1.0, Status.PASS, "1 ports without trouble in 1 h"),
        ({"carrier_changes": 2}, 24.0, Status.WARN, "link lost 1 times in 24 h"),
        ({"carrier_changes": 1}, 24.0, Status.WARN, "link lost 1 times in 24 h"),
        ({"link_downed": 5}, 0.5, Status.FAIL, "link lost 5 times in 0.5 h"),
        ({"link_downed": 5}, 24.0, Status.WARN, "link lost 5 times in 24 h"),
        ({"symbol_error": 130}, 1.0, Status.WARN, "symbol_error +130 in 1 h"),
        ({"symbol_error": 130}, 2.0, Status.PASS, "1 ports without trouble in 2 h"),
        ({"rx_errors": 9}, 0.01, Status.PASS, "1 ports without trouble in 0.01 h"),
        ({"rx_errors": 11}, 0.01, Status.WARN, "rx_errors +11 in 0.01 h"),
    ],
)
def test_verdicts(counters: dict[str, int], hours: float, status: Status, measured: str) -> None:
    before = reading(**{"mlx5_0/1": dict.fromkeys(counters, 0)})
    (found,) = judge_counters(before, reading(hours, **{"mlx5_0/1": counters}), host="h1")
    assert (found.status, found.measured) == (status, measured)


def test_a_first_reading_and_no_ports() -> None:
    assert [found.status for found in judge_counters(None, reading(eth0={}), host="h1")] == [Status.SKIP]
    assert judge_counters(None, reading(), host="h1") == []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "counters.json"
    assert load(path) is None
    wanted = reading(1.0, eth0={"rx_errors": 3})
    store(path, reading())
    store(path, wanted)
    assert load(path) == wanted
    assert [entry.name for entry in path.parent.iterdir()] == ["counters.json"]
    written = path.read_text()
    path.write_text(written.replace('"format":1', '"format":2'))
    assert path.read_text() != written
    assert load(path) is None


@given(
    text=st.one_of(
        st.text(), st.sampled_from(["[]", '{"format": 1}', '{"format": 1, "ports": {}}', '{"format": 2, "ports": {}}'])
    )
)
def test_a_file_that_is_not_ours_is_no_reading(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbled.json"
    path.write_text(text)
    assert load(path) is None


numbers = st.dictionaries(st.sampled_from(["carrier_changes", "rx_errors", "link_downed"]), st.integers(0, 2**40))


@given(before=numbers, after=numbers, boot=st.sampled_from(["a", "b"]), hours=st.floats(-5, 1e4))
def test_growth_is_never_negative(before: dict[str, int], after: dict[str, int], boot: str, hours: float) -> None:
    first, second = reading(eth0=before), reading(hours, boot=boot, eth0=after)
    grown_h, ports = growth(first, second)
    assert grown_h >= 0
    assert all(value >= 0 for value in ports["eth0"].values())
    assert judge_counters(first, second, host="h1")


def test_where_counters_are_kept() -> None:
    ending = f"h1-{os.getuid()}.json"
    host = Surroundings(host="h1", environment={"HOME": "/home/x"})
    assert counters_path(host) == Path("/home/x/.local/state/elastictrain") / f"counters-{ending}"
    host = Surroundings(host="h1", environment={"HOME": "/home/x", "XDG_STATE_HOME": "/state"})
    assert counters_path(host) == Path("/state/elastictrain") / f"counters-{ending}"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    ending = f"elastictrain-counters-h1-{os.getuid()}.json"
    assert counters_path(Surroundings(host="h1", environment={})) == Path("/tmp") / ending
    assert counters_path(Surroundings(host="h1", environment={"TMPDIR": "/scratch"})) == Path("/scratch") / ending


def test_errors_of_gpus_count_between_preflights(
    make_host: Callable[..., Surroundings], answered: Callable[..., ToolOutput], recorded: Callable[[str], str]
) -> None:
    report = parse_nvidia(answered("nvidia_smi_550_h100.xml"))
    host, errors = make_host(), parse_errors(recorded("nvlink_errors_h100.txt"))
    before = read_counters(host, now=0.0, gpus=report.gpus)
    assert before.ports["GPU 1 at 0000:43:00.0"] == {"pcie_replays": 0}
    first = read_counters(host, now=0.0, gpus=report.gpus, errors=errors)
    second = dict(errors)
    second[1] = {**errors[1], "nvlink_replay": 9}
    worn = [replace(report.gpus[0], replays=500), report.gpus[1]]
    found = judge_counters(first, read_counters(host, now=3600.0, gpus=worn, errors=second), host="h1")
    assert [(one.subject, one.status) for one in found] == [
        ("GPU 0 at 0000:1b:00.0 on h1", Status.WARN),
        ("GPU 1 at 0000:43:00.0 on h1", Status.WARN),
    ]
    assert all("GPU" in one.remedy and "mlxlink" not in one.remedy for one in found)
    # CRC errors at a usual rate are noise, and a GPU that is hidden now is not gone.
    second[1] = {**errors[1], "nvlink_crc": 5000}
    quiet = judge_counters(first, read_counters(host, now=3600.0, gpus=report.gpus[1:], errors=second), host="h1")
    assert [one.status for one in quiet] == [Status.PASS]
