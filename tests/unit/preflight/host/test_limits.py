import pytest

from elastictrain.preflight.host.cgroup import ProcessGroup
from elastictrain.preflight.host.limits import (
    LimitFacts,
    ResourceLimit,
    judge_memlock,
    judge_open_files,
    judge_processes,
    parse_capabilities,
    read_limits,
)
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Status

NONE = ResourceLimit(None, None)
IPC_LOCK, SYS_RESOURCE = 1 << 14, 1 << 24


def facts(
    *,
    memlock: ResourceLimit = NONE,
    files: ResourceLimit = NONE,
    processes: ResourceLimit = NONE,
    capabilities: int | None = 0,
    group: ProcessGroup | None = None,
) -> LimitFacts:
    return LimitFacts(memlock, files, processes, capabilities, group)


def test_memlock_matters_with_rdma_only() -> None:
    low = facts(memlock=ResourceLimit(8 << 20, 8 << 20))
    assert judge_memlock(low, host="h1", rdma=False).status is Status.PASS
    verdict = judge_memlock(low, host="h1", rdma=True)
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.WARN, 0.00781, "GiB")
    assert "--ulimit memlock=-1" in verdict.remedy
    assert judge_memlock(facts(), host="h1", rdma=True).status is Status.PASS


def test_memlock_that_may_be_raised() -> None:
    verdict = judge_memlock(facts(memlock=ResourceLimit(65536, None), capabilities=None), host="h1", rdma=True)
    assert (verdict.status, verdict.remedy) == (Status.WARN, "`ulimit -l unlimited` before the start")


def test_memlock_is_lifted_by_a_capability() -> None:
    lifted = facts(memlock=ResourceLimit(65536, 65536), capabilities=IPC_LOCK)
    assert judge_memlock(lifted, host="h1", rdma=True).status is Status.PASS


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
    verdict = judge_open_files(facts(files=limit), host="h1")
    assert verdict.status is status
    assert remedy in verdict.remedy


@pytest.mark.parametrize(
    ("limit", "capabilities", "status", "remedy"),
    [
        (ResourceLimit(None, None), 0, Status.PASS, ""),
        (ResourceLimit(512, 60000), 0, Status.WARN, "ulimit -u 60000"),
        (ResourceLimit(512, 512), None, Status.WARN, "LimitNPROC=65536"),
        (ResourceLimit(20, 512), 0, Status.FAIL, "LimitNPROC=65536"),
        (ResourceLimit(20, 512), SYS_RESOURCE, Status.PASS, ""),
    ],
)
def test_processes(limit: ResourceLimit, capabilities: int | None, status: Status, remedy: str) -> None:
    verdict = judge_processes(facts(processes=limit, capabilities=capabilities), host="h1")
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
    verdict = judge_processes(facts(capabilities=SYS_RESOURCE, group=group), host="h1")
    assert verdict.status is status
    if status is not Status.PASS:
        assert "--pids-limit=-1" in verdict.remedy


def test_capabilities() -> None:
    assert parse_capabilities("Name:\tx\nCapEff:\t0000000000004000\n") == IPC_LOCK
    assert parse_capabilities("CapEff:\tall\n") is None
    assert parse_capabilities("") is None


def test_reading_the_real_ones() -> None:
    found = read_limits(Surroundings())
    assert found.open_files.soft is None or found.open_files.soft > 0
    assert found.capabilities is not None
