from pathlib import Path

import pytest

from elastictrain.preflight.check import run_checks
from elastictrain.preflight.host.cgroup import Throttling
from elastictrain.preflight.host.checks import HostOptions, host_checks
from elastictrain.preflight.host.throttled import keep_throttling, load_throttling
from elastictrain.preflight.kept import keep
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.host.conftest import HostMaker

NOW = Throttling(1000, 300, 20.5)


def files(*, boot: str = "b-1", group: str = "0::/job\n", periods: int = 0, throttled: int = 0) -> dict[str, str]:
    return {
        "proc/sys/kernel/random/boot_id": boot,
        "proc/self/cgroup": group,
        "sys/fs/cgroup/cpu.stat": f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 5\n",
    }


def test_what_is_kept_counts_for_the_same_group_and_boot(make_host: HostMaker, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "throttling.json"
    assert load_throttling(path, make_host(files())) is None
    keep_throttling(path, NOW, make_host(files()))
    assert load_throttling(path, make_host(files())) == NOW
    assert load_throttling(path, make_host(files(boot="b-2"))) is None
    assert load_throttling(path, make_host(files(group="0::/other\n"))) is None
    assert load_throttling(path, make_host(files(boot=""))) is None


@pytest.mark.parametrize("wrong", [{"periods": "9"}, {"periods": True}, {"throttled_periods": -1}, {"throttled_s": None}])
def test_garbled_figures_are_unknown(wrong: dict[str, object], make_host: HostMaker, tmp_path: Path) -> None:
    path = tmp_path / "throttling.json"
    row = {"format": 1, "boot_id": "b-1", "group": "0::/job", "periods": 1, "throttled_periods": 1, "throttled_s": 1}
    keep(path, row)
    assert load_throttling(path, make_host(files())) == Throttling(1, 1, 1.0)
    keep(path, {**row, **wrong})
    assert load_throttling(path, make_host(files())) is None


def test_what_cannot_be_kept_harms_nobody(make_host: HostMaker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_throttling(tmp_path / "file" / "throttling.json", NOW, make_host(files()))
    keep_throttling(tmp_path / "throttling.json", NOW, Surroundings(root=tmp_path / "nothing"))
    assert not (tmp_path / "throttling.json").exists()


def test_each_preflight_counts_from_the_last_one(make_host: HostMaker, tmp_path: Path) -> None:
    def check(periods: int, throttled: int) -> Status:
        host = make_host(files(periods=periods, throttled=throttled))
        checks = host_checks(host, HostOptions(), last_throttling=tmp_path / "throttling.json")
        (found,) = run_checks([one for one in checks if one.name == "cpu"], subject="h1")
        return found.status

    assert check(1000, 300) is Status.WARN
    assert check(2000, 310) is Status.PASS
    # Starts that follow each other fast say something together.
    assert check(2050, 340) is Status.PASS
    assert check(2120, 380) is Status.WARN
    assert check(2240, 380) is Status.PASS
    # A group that was made anew counts from its beginning.
    assert check(500, 200) is Status.WARN
