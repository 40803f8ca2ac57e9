"""Whatever the kernel's files say, a check answers, and never breaks."""

import resource
import string
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastictrain.cgroup import mount_of, parse_membership, read_allowance, read_mounts
from elastictrain.preflight.host.names import parse_hosts
from elastictrain.preflight.host.resources import judge_cpu, judge_memory, judge_processes, read_capabilities, read_limit
from elastictrain.preflight.host.storage_trip import TripMessage, judge_trip, parse_messages
from elastictrain.preflight.verdict import Verdict
from elastictrain.surroundings import Surroundings
from tests.unit.examples import examples

WORDS = st.sampled_from(
    [
        *("max", "-1", "0", "100000", "9223372036854771712", "9" * 30, "nan", "kB", "0A", "00000000:733C", "é\ud800"),
        *("cpu", "memory", "pids", "cgroup", "cgroup2", "rw,cpu", "-", "/", "/a/b", "/..", ":", "::", "\\000", "\\040"),
        *("0::/", "3:cpu,cpuacct:/a", "1:memory:/a\0b", "nr_periods", "nr_throttled", "throttled_usec"),
        "CapEff:",
    ]
)
LINES = st.lists(WORDS, max_size=12).map(" ".join)
TEXTS = st.one_of(st.lists(LINES, max_size=6).map("\n".join), st.text(string.printable + "\0é", max_size=80))
FILES = [
    "proc/self/mountinfo",
    "proc/self/cgroup",
    "proc/self/status",
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
        allowance = read_allowance(host.root)
        assert allowance.cpus is None or allowance.cpus > 0
        capabilities, limit = read_capabilities(host), read_limit(resource.RLIMIT_NPROC)
        verdicts = [
            judge_memory(total=1 << 36, available=1 << 35, swapped=0, group=allowance.memory, host="h1"),
            judge_cpu(allowance, visible=4, needed=None, host="h1"),
            judge_processes(limit, allowance.processes, capabilities=capabilities, host="h1"),
        ]
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        mount_of("/a/b", read_mounts(host.root))


@settings(max_examples=examples(150))
@given(TEXTS)
def test_every_parser_answers(text: str) -> None:
    parse_membership(text)
    parse_hosts(text)
    facts = parse_messages(text, url="/x", mount=None, silent=TripMessage(fault="CRASHED", message="no word"))
    assert judge_trip(facts, host="h1", environment={}).check == "storage"
