from collections.abc import Mapping
from pathlib import Path

from elastictrain.cgroup import (
    Allowance,
    MemoryGroup,
    Mount,
    ProcessGroup,
    Throttling,
    memory_groups,
    mount_of,
    read_allowance,
    read_mounts,
)

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
STAT = "usage_usec 900\nuser_usec 600\nnr_periods 400\nnr_throttled 100\nthrottled_usec 2500000\n"


def made(root: Path, files: Mapping[str, str]) -> Path:
    """A host with these files below `root`, which stands for /."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_tightest_level_counts(tmp_path: Path) -> None:
    slice_, scope = "sys/fs/cgroup/job.slice", "sys/fs/cgroup/job.slice/run.scope"
    host = made(
        tmp_path,
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/job.slice/run.scope\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
            f"{slice_}/cpu.max": "250000 100000\n",
            f"{slice_}/memory.max": str(8 * GIB),
            f"{slice_}/memory.current": str(7 * GIB),
            f"{slice_}/memory.stat": f"anon 5\ninactive_file {3 * GIB}\n",
            f"{slice_}/pids.max": "max\n",
            f"{slice_}/pids.current": "90\n",
            f"{scope}/cpu.max": "max 100000\n",
            f"{scope}/cpu.stat": STAT,
            f"{scope}/memory.max": str(16 * GIB),
            f"{scope}/memory.current": str(2 * GIB),
            f"{scope}/pids.max": "200\n",
            f"{scope}/pids.current": "50\n",
        },
    )
    assert read_allowance(host) == Allowance(
        cpus=2.5,
        throttling=Throttling(400, 100),
        memory=MemoryGroup(8 * GIB, 4 * GIB),
        processes=ProcessGroup(200, 50),
    )


def test_version_2_in_a_container_sees_itself_as_the_root(tmp_path: Path) -> None:
    for path in ("/", "/kubepods.slice/pod-7/cri-1", "/../../cri-1"):
        host = made(
            tmp_path,
            {
                "proc/self/mountinfo": V2_MOUNT,
                "proc/self/cgroup": f"0::{path}\n",
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "400\n",
            },
        )
        assert read_allowance(host) == Allowance(cpus=0.5, memory=MemoryGroup(1000, 400))


def test_path_that_leads_out_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    host = made(
        tmp_path,
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/../../other\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
            "sys/other/cpu.max": "100000 100000\n",
        },
    )
    assert read_allowance(host).cpus == 2.0


def test_version_1_with_controllers_together_and_a_container_below_the_mount(tmp_path: Path) -> None:
    point = "sys/fs/cgroup/cpu,cpuacct"
    host = made(
        tmp_path,
        {
            "proc/self/mountinfo": (
                "33 32 0:29 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro master:11 - cgroup cgroup rw,cpu,cpuacct\n"
                "34 32 0:30 /docker/abc /sys/fs/cgroup/memory ro master:12 - cgroup cgroup rw,memory\n"
            ),
            "proc/self/cgroup": "4:memory:/docker/abc/child\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
            f"{point}/cpu.cfs_quota_us": "150000\n",
            f"{point}/cpu.cfs_period_us": "100000\n",
            f"{point}/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 3000000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/child/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/child/memory.usage_in_bytes": "5\n",
        },
    )
    assert read_allowance(host) == Allowance(cpus=1.5, throttling=Throttling(10, 4), memory=MemoryGroup(4 * GIB, 2 * GIB))


def test_hybrid_takes_each_controller_from_where_it_is(tmp_path: Path) -> None:
    host = made(
        tmp_path,
        {
            "proc/self/mountinfo": (
                "40 31 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                "41 31 0:41 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            ),
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/cpu.max": "1 100000\n",
            "sys/fs/cgroup/unified/pids.max": "70\n",
            "sys/fs/cgroup/unified/pids.current": "7\n",
        },
    )
    assert read_allowance(host) == Allowance(processes=ProcessGroup(70, 7))


def test_without_mountinfo_the_usual_place_is_taken(tmp_path: Path) -> None:
    host = made(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert read_allowance(host) == Allowance(cpus=2.0)


def test_a_limit_of_version_1_that_is_none_is_left_out(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {"proc/self/cgroup": "4:memory:/\n", f"{folder}/memory.limit_in_bytes": "9223372036854771712\n"}
    assert memory_groups(made(tmp_path, {**files, f"{folder}/memory.usage_in_bytes": "5\n"})) == []


def test_the_level_that_was_throttled_most_counts(tmp_path: Path) -> None:
    stats = {"": (400, 100), "job/": (300, 200), "job/run/": (10, 1)}
    files = {f"sys/fs/cgroup/{name}cpu.stat": f"nr_periods {a}\nnr_throttled {b}\n" for name, (a, b) in stats.items()}
    found = read_allowance(made(tmp_path, {"proc/self/cgroup": "0::/job/run\n", **files}))
    assert found.throttling == Throttling(300, 200)


def test_every_level_that_limits_memory_is_listed(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job/run\n"}
    for folder, limit, used, inactive in (
        ("", "max", 90, 0),
        ("job/", 50, 45, 20),
        ("job/run/", 100, 30, 10),
        ("other/", 1, 1, 0),
    ):
        files[f"sys/fs/cgroup/{folder}memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}memory.current"] = f"{used}\n"
        files[f"sys/fs/cgroup/{folder}memory.stat"] = f"anon 1\ninactive_file {inactive}\nactive_file 2\n"
    assert [(group.limit_bytes, group.free_bytes) for group in memory_groups(made(tmp_path, files))] == [(100, 80), (50, 25)]


def test_nothing_known(tmp_path: Path) -> None:
    assert read_allowance(made(tmp_path, {})) == Allowance()


def test_garbled(tmp_path: Path) -> None:
    host = made(
        tmp_path,
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "what\n0:/\n0::relative\n",
            "sys/fs/cgroup/cpu.max": "fast 100000\n",
            "sys/fs/cgroup/cpu.stat": "nr_periods many\nnr_throttled\n",
            "sys/fs/cgroup/memory.max": "-1\n",
            "sys/fs/cgroup/memory.current": "9" * 400,
            "sys/fs/cgroup/pids.max": "\u0663\n",
            "sys/fs/cgroup/pids.current": "3\n",
        },
    )
    assert read_allowance(host) == Allowance()


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
40 27 0:40 /exports/run /mnt/my\\040runs rw master:7 propagate_from:2 - nfs4 server:/exports rw,hard,vers=4.2
41 40 0:41 / /mnt/my\\040runs/fast rw - tmpfs tmpfs ro,size=4k
43 27 0:43 / /mnt/my rw - ext4 /dev/vdb
"""


def mounts_in(tmp_path: Path, text: str) -> list[Mount]:
    return read_mounts(made(tmp_path, {"proc/self/mountinfo": text}))


def test_parsing_mounts(tmp_path: Path) -> None:
    mounts = mounts_in(tmp_path, MOUNTS)
    assert [mount.point for mount in mounts] == ["/proc", "/", "/mnt/my runs", "/mnt/my runs/fast", "/mnt/my"]
    assert mounts[2].root == "/exports/run"
    assert mounts[2].kind == "nfs4"
    assert "hard" in mounts[2].options


def test_innermost_mount_counts(tmp_path: Path) -> None:
    mounts = mounts_in(tmp_path, MOUNTS)
    found = {
        path: mount_of(path, mounts) for path in ("/mnt/my runs/fast/x", "/mnt/my runs/fastest", "/mnt/mystery", "/mnt/my")
    }
    assert [mount and mount.point for mount in found.values()] == ["/mnt/my runs/fast", "/mnt/my runs", "/", "/mnt/my"]


def test_later_mount_hides_the_earlier_one(tmp_path: Path) -> None:
    mounts = mounts_in(tmp_path, "1 0 0:1 / /x rw - ext4 a rw\n2 0 0:2 / /x rw - tmpfs b rw\n")
    mount = mount_of("/x/y", mounts)
    assert mount is not None
    assert mount.kind == "tmpfs"


def test_no_mount_is_known(tmp_path: Path) -> None:
    assert mounts_in(tmp_path, "no mounts here\n1 2 3 - \n - ext4 x\n") == []
    assert mount_of("/x", []) is None
