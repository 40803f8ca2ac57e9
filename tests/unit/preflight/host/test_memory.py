from elastictrain.preflight.host.cgroup import MemoryGroup
from elastictrain.preflight.host.memory import MemoryFacts, judge_memory, parse_meminfo, read_memory
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Status
from tests.unit.preflight.host.conftest import HostMaker

MIB, GIB = 1 << 20, 1 << 30
MEMINFO = "MemTotal: 65536 kB\nMemAvailable: 32768 kB\nSwapTotal: 4096 kB\nSwapFree: 1024 kB\nHugePages_Total: 0\nodd\n"


def facts(available: int | None, *, group: MemoryGroup | None = None, swapped: int | None = 0) -> MemoryFacts:
    return MemoryFacts(100 * GIB, available, swapped, group)


def test_enough() -> None:
    verdict = judge_memory(facts(50 * GIB), host="h1")
    assert (verdict.status, verdict.measured, verdict.unit) == (Status.PASS, 50.0, "GiB available")


def test_little_of_it() -> None:
    assert judge_memory(facts(GIB), host="h1").status is Status.WARN
    assert judge_memory(facts(100 * MIB), host="h1").status is Status.FAIL
    little = judge_memory(facts(GIB), host="h1")
    assert (little.measured, little.expected) == (1.0, 2.0)
    assert "ps -eo rss,pid,user,comm" in little.remedy


def test_the_limit_of_the_container_counts() -> None:
    verdict = judge_memory(facts(50 * GIB, group=MemoryGroup(8 * GIB, 8 * GIB - 100 * MIB)), host="h1")
    assert (verdict.status, verdict.unit) == (Status.FAIL, "GiB available of the container's 8 GiB")
    assert "docker run --memory" in verdict.remedy
    assert judge_memory(facts(50 * GIB, group=MemoryGroup(90 * GIB, GIB)), host="h1").unit == "GiB available"
    assert judge_memory(facts(None, group=MemoryGroup(8 * GIB, GIB)), host="h1").measured == 7.0


def test_swap_counts_where_memory_is_scarce() -> None:
    assert judge_memory(facts(15 * GIB, swapped=10 * GIB), host="h1").status is Status.WARN
    assert judge_memory(facts(50 * GIB, swapped=10 * GIB), host="h1").status is Status.PASS
    assert judge_memory(facts(15 * GIB, swapped=GIB), host="h1").status is Status.PASS
    assert judge_memory(facts(15 * GIB, swapped=None), host="h1").status is Status.PASS


def test_unknown() -> None:
    verdict = judge_memory(MemoryFacts(None, None, None, None), host="h1")
    assert (verdict.status, verdict.remedy) == (Status.SKIP, "look at /proc/meminfo on h1")


def test_reading(make_host: HostMaker) -> None:
    found = read_memory(make_host({"proc/meminfo": MEMINFO}))
    assert found == MemoryFacts(64 * MIB, 32 * MIB, 3 * MIB, None)
    assert read_memory(make_host({"proc/meminfo": "MemTotal: lots kB\n"})).total is None
    assert parse_meminfo("MemTotal: 5 GB\nMemFree: 5\n") == {}


def test_reading_the_real_one() -> None:
    found = read_memory(Surroundings())
    assert found.total is not None
    assert found.available is not None
    assert 0 < found.available <= found.total
