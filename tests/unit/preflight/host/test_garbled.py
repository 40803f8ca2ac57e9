"""Whatever the kernel's files say, a check answers, and never breaks."""

import string
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastictrain.preflight.host.cgroup import parse_membership, read_allowance
from elastictrain.preflight.host.cpu import count_cpus, judge_cpu, judge_load, read_cpu
from elastictrain.preflight.host.limits import judge_memlock, judge_open_files, judge_processes, parse_capabilities, read_limits
from elastictrain.preflight.host.memory import judge_memory, read_memory
from elastictrain.preflight.host.mounts import mount_of, parse_mounts
from elastictrain.preflight.host.names import parse_hosts
from elastictrain.preflight.host.ports import find_holder
from elastictrain.preflight.host.storage_trip import judge_trip, parse_words
from elastictrain.preflight.surroundings import Surroundings
from elastictrain.preflight.verdict import Verdict
from tests.unit.examples import examples

WORDS = st.sampled_from(
    [
        *("max", "-1", "0", "100000", "9223372036854771712", "9" * 30, "nan", "kB", "0A", "00000000:733C", "é\ud800"),
        *("cpu", "memory", "pids", "cgroup", "cgroup2", "rw,cpu", "-", "/", "/a/b", "/..", ":", "::", "\\000", "\\040"),
        *("0::/", "3:cpu,cpuacct:/a", "1:memory:/a\0b", "nr_periods", "nr_throttled", "throttled_usec"),
        *("MemTotal:", "MemAvailable:", "SwapTotal:", "CapEff:"),
    ]
)
LINES = st.lists(WORDS, max_size=12).map(" ".join)
TEXTS = st.one_of(st.lists(LINES, max_size=6).map("\n".join), st.text(string.printable + "\0é", max_size=80))
FILES = [
    "proc/self/mountinfo",
    "proc/self/cgroup",
    "proc/self/status",
    "proc/meminfo",
    "proc/loadavg",
    "proc/net/tcp",
    "sys/devices/system/cpu/online",
    *(
        f"sys/fs/cgroup/{folder}{name}"
        for folder in ("", "a/", "cpu/")
        for name in ("cpu.max", "cpu.stat", "memory.max", "memory.current", "memory.stat", "pids.max", "pids.current")
    ),
    *(f"sys/fs/cgroup/{name}" for name in ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us", "memory/memory.limit_in_bytes")),
]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FILES), TEXTS, max_size=8))
def test_every_check_answers(files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, errors="surrogatepass")
        host = Surroundings(host="h1", root=Path(folder), environment={})
        allowance = read_allowance(host)
        assert allowance.cpus is None or allowance.cpus > 0
        limits, cpu = read_limits(host), read_cpu(host, needed=None)
        verdicts = [
            judge_memory(read_memory(host), host="h1"),
            judge_cpu(cpu, host="h1"),
            judge_load(cpu, host="h1"),
            judge_memlock(limits, host="h1", rdma=True),
            judge_open_files(limits, host="h1"),
            judge_processes(limits, host="h1"),
        ]
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        assert find_holder(host, 29500) is None


@settings(max_examples=examples(150))
@given(TEXTS)
def test_every_parser_answers(text: str) -> None:
    mount_of("/a/b", parse_mounts(text))
    parse_membership(text)
    parse_capabilities(text)
    parse_hosts(text)
    count_cpus(text)
    assert judge_trip(parse_words(text, url="/x", mount=None), host="h1", environment={}).check == "storage"
