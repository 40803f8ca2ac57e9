import pytest

from elastictrain.preflight.host.cgroup import Throttling
from elastictrain.preflight.host.cpu import CpuFacts, count_cpus, judge_cpu, judge_load, read_cpu, throttled_share
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.host.conftest import HostMaker


def facts(
    *,
    visible: int = 8,
    quota: float | None = None,
    throttling: Throttling | None = None,
    load: float | None = 1.0,
    needed: float | None = None,
) -> CpuFacts:
    return CpuFacts(visible, 16, quota, throttling, load, needed)


def test_all_cpus() -> None:
    verdict = judge_cpu(facts(), host="h1")
    assert (verdict.status, verdict.measured) == (Status.PASS, 8)


def test_quota() -> None:
    verdict = judge_cpu(facts(quota=2.5), host="h1")
    assert (verdict.status, verdict.measured, verdict.expected) == (Status.WARN, 2.5, 8)
    assert verdict.unit == "CPUs (a quota of 2.5)"
    assert "OMP_NUM_THREADS=2" in verdict.remedy
    assert judge_cpu(facts(quota=2.5, needed=2), host="h1").status is Status.PASS
    assert judge_cpu(facts(needed=9), host="h1").unit == "CPUs (8 visible)"


def test_throttling() -> None:
    bad = facts(throttling=Throttling(1000, 300))
    verdict = judge_cpu(bad, host="h1")
    assert (verdict.status, verdict.measured) == (Status.WARN, "throttled in 30% of its periods")
    assert judge_cpu(facts(throttling=Throttling(1000, 50)), host="h1").status is Status.PASS


def test_share_of_throttled_periods() -> None:
    assert throttled_share(None) is None
    assert throttled_share(Throttling(99, 99)) is None
    assert throttled_share(Throttling(200, 100)) == 0.5


def test_load() -> None:
    assert judge_load(facts(load=24.0), host="h1").status is Status.PASS
    busy = judge_load(facts(load=24.1), host="h1")
    assert (busy.status, busy.expected) == (Status.WARN, 24.0)
    assert "ps -eo pcpu,pid,user,comm" in busy.remedy
    assert judge_load(facts(load=None), host="h1").status is Status.SKIP
    assert judge_load(CpuFacts(8, None, None, None, 3.0), host="h1").status is Status.SKIP


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-3", 4), ("0", 1), ("0-1,4,6-7", 5), ("", None), ("3-0", None), ("a-b", None), ("0-", None), ("0,,1", None)],
)
def test_counting_cpus(text: str, count: int | None) -> None:
    assert count_cpus(text) == count


def test_reading(make_host: HostMaker) -> None:
    host = make_host(
        {
            "proc/loadavg": "3.25 2.00 1.00 4/900 1234\n",
            "sys/devices/system/cpu/online": "0-31\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        }
    )
    found = read_cpu(host, needed=3)
    assert (found.online, found.quota, found.load, found.needed) == (32, 4.0, 3.25, 3)
    for garbled in ("", "nan", "much 1", "-1 2"):
        assert read_cpu(make_host({"proc/loadavg": garbled}), needed=None).load is None
