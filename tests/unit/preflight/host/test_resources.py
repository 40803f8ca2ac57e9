import os
import resource

import psutil
import pytest

from elastictrain.cgroup import Allowance, MemoryGroup, ProcessGroup, Throttling
from elastictrain.preflight.host.resources import (
    ResourceLimit,
    judge_cpu,
    judge_load,
    judge_memlock,
    judge_memory,
    judge_open_files,
    judge_processes,
    read_capabilities,
    read_limit,
)
from elastictrain.preflight.verdict import Status, Verdict
from elastictrain.surroundings import Surroundings
from tests.unit.preflight.conftest import HostMaker

MIB, GIB = 1 << 20, 1 << 30
NONE = ResourceLimit(None, None)
IPC_LOCK, SYS_RESOURCE = 1 << 14, 1 << 24


def memory(available: int, *, group: MemoryGroup | None = None, swapped: int = 0) -> Verdict:
    return judge_memory(total=100 * GIB, available=available, swapped=swapped, group=group, host="h1")


def test_enough_memory() -> None:
    verdict = memory(50 * GIB)
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.PASS, 50.0, "GiB available")


def test_little_memory() -> None:
    assert memory(GIB).status is Status.WARN
    assert memory(100 * MIB).status is Status.FAIL
    little = memory(GIB)
    assert (little.measured, little.expected) == (1.0, 2.0)
    assert "rss,pid,user,comm" in little.remedy


def test_the_limit_of_the_container_counts() -> None:
    verdict = memory(50 * GIB, group=MemoryGroup(8 * GIB, 8 * GIB - 100 * MIB))
    assert (verdict.status, "container's 8" in verdict.unit) == (Status.FAIL, True)
    assert "--memory" in verdict.remedy
    assert memory(50 * GIB, group=MemoryGroup(90 * GIB, GIB)).unit == "GiB available"
    assert memory(50 * GIB, group=MemoryGroup(8 * GIB, GIB)).measured == 7.0


def test_swap_counts_where_memory_is_scarce() -> None:
    assert memory(15 * GIB, swapped=10 * GIB).status is Status.WARN
    assert memory(50 * GIB, swapped=10 * GIB).status is Status.PASS
    assert memory(15 * GIB, swapped=GIB).status is Status.PASS


def cpu(
    *, visible: int = 8, quota: float | None = None, throttling: Throttling | None = None, needed: float | None = None
) -> Verdict:
    return judge_cpu(Allowance(cpus=quota, throttling=throttling), visible=visible, needed=needed, host="h1")


def test_all_cpus() -> None:
    verdict = cpu()
    assert (verdict.status, verdict.measured) == (Status.PASS, 8)


def test_quota() -> None:
    verdict = cpu(quota=2.5)
    assert (verdict.status, verdict.measured, verdict.expected) == (Status.WARN, 2.5, 8)
    assert "quota" in verdict.unit
    assert "OMP_NUM_THREADS=2" in verdict.remedy
    assert cpu(quota=2.5, needed=2).status is Status.PASS
    assert "8 visible" in cpu(needed=9).unit


def test_throttling() -> None:
    verdict = cpu(throttling=Throttling(1000, 300))
    assert (verdict.status, "30%" in str(verdict.measured)) == (Status.WARN, True)
    assert cpu(throttling=Throttling(1000, 50)).status is Status.PASS


def test_a_few_throttled_periods_say_nothing() -> None:
    assert cpu(throttling=Throttling(99, 99)).status is Status.PASS
    assert "50%" in str(cpu(throttling=Throttling(200, 100)).measured)


def test_load() -> None:
    assert judge_load(24.0, cpus=16, host="h1").status is Status.PASS
    busy = judge_load(24.1, cpus=16, host="h1")
    assert (busy.status, busy.expected) == (Status.WARN, 24.0)
    assert "pcpu,pid,user,comm" in busy.remedy


def test_memlock_matters_with_rdma_only() -> None:
    low = ResourceLimit(8 << 20, 8 << 20)
    assert judge_memlock(low, capabilities=0, host="h1", rdma=False).status is Status.PASS
    verdict = judge_memlock(low, capabilities=0, host="h1", rdma=True)
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.WARN, 0.00781, "GiB")
    assert "--ulimit memlock=-1" in verdict.remedy
    assert judge_memlock(NONE, capabilities=0, host="h1", rdma=True).status is Status.PASS


def test_memlock_that_may_be_raised() -> None:
    verdict = judge_memlock(ResourceLimit(65536, None), capabilities=0, host="h1", rdma=True)
    assert (verdict.status, "`ulimit -l" in verdict.remedy) == (Status.WARN, True)


def test_memlock_is_lifted_by_a_capability() -> None:
    lifted = judge_memlock(ResourceLimit(65536, 65536), capabilities=IPC_LOCK, host="h1", rdma=True)
    assert lifted.status is Status.PASS


@pytest.mark.parametrize(
    ("limit", "status", "remedy"),
    [
        (ResourceLimit(None, None), Status.PASS, ""),
        (ResourceLimit(4096, 4096), Status.PASS, ""),
        (ResourceLimit(1024, 524288), Status.WARN, "ulimit -n 65536"),
        (ResourceLimit(1024, None), Status.WARN, "ulimit -n 65536"),
        (ResourceLimit(1024, 5000), Status.WARN, "ulimit -n 5000"),
        (ResourceLimit(1024, 1024), Status.WARN, "LimitNOFILE=65536"),
        (ResourceLimit(64, 1024), Status.FAIL, "LimitNOFILE=65536"),
    ],
)
def test_open_files(limit: ResourceLimit, status: Status, remedy: str) -> None:
    verdict = judge_open_files(limit, host="h1")
    assert verdict.status is status
    assert remedy in verdict.remedy


@pytest.mark.parametrize(
    ("limit", "capabilities", "status", "remedy"),
    [
        (ResourceLimit(None, None), 0, Status.PASS, ""),
        (ResourceLimit(512, 60000), 0, Status.WARN, "ulimit -u 60000"),
        (ResourceLimit(512, 512), 0, Status.WARN, "LimitNPROC=65536"),
        (ResourceLimit(20, 512), 0, Status.FAIL, "LimitNPROC=65536"),
        (ResourceLimit(20, 512), SYS_RESOURCE, Status.PASS, ""),
    ],
)
def test_processes(limit: ResourceLimit, capabilities: int, status: Status, remedy: str) -> None:
    verdict = judge_processes(limit, None, capabilities=capabilities, host="h1")
    assert verdict.status is status
    assert remedy in verdict.remedy


@pytest.mark.parametrize(
    ("group", "status"),
    [
        (ProcessGroup(20000, 100), Status.PASS),
        (ProcessGroup(500, 100), Status.WARN),
        (ProcessGroup(120, 100), Status.FAIL),
        (ProcessGroup(100, 120), Status.FAIL),
    ],
)
def test_processes_of_a_container(group: ProcessGroup, status: Status) -> None:
    verdict = judge_processes(NONE, group, capabilities=SYS_RESOURCE, host="h1")
    assert verdict.status is status
    if status is not Status.PASS:
        assert "--pids-limit=-1" in verdict.remedy


def test_capabilities(make_host: HostMaker) -> None:
    assert read_capabilities(make_host({"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n"})) == IPC_LOCK
    assert read_capabilities(make_host({"proc/self/status": "CapEff:\tall\n"})) == 0
    assert read_capabilities(make_host({"proc/self/status": ""})) == 0


def test_reading_the_real_ones() -> None:
    files = read_limit(resource.RLIMIT_NOFILE)
    assert files.soft is None or files.soft > 0
    assert (read_capabilities(Surroundings()) > 0) is (os.geteuid() == 0)
    found = psutil.virtual_memory()
    assert memory(found.available).check == "memory"
