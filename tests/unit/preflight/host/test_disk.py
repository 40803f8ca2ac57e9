import tempfile
from pathlib import Path

from elastictrain.cgroup import read_mounts
from elastictrain.preflight.host.resources import (
    CheckedFolder,
    Space,
    folders_of,
    judge_disk,
    judge_shared_memory,
    read_space,
)
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.conftest import HostMaker

MIB, GIB = 1 << 20, 1 << 30


def disk(free_bytes: int, *, inodes: int | None = 1_000_000) -> Verdict:
    folder = CheckedFolder("/runs/a", "run.dir", "set run.dir elsewhere")
    return judge_disk(folder, Space("/runs", 100 * GIB, free_bytes, inodes), host="h1")


def test_disk() -> None:
    assert disk(50 * GIB).status is Status.PASS
    assert disk(50 * GIB, inodes=None).status is Status.PASS
    assert disk(500 * MIB).status is Status.WARN
    full = disk(MIB)
    assert (full.status, full.measured, full.unit.split()[0]) == (Status.FAIL, 0.000977, "GiB")
    assert "`du -xhd1" in full.remedy
    assert full.remedy.endswith("; set run.dir elsewhere")


def test_inodes() -> None:
    scarce, none = disk(50 * GIB, inodes=5000), disk(50 * GIB, inodes=3)
    assert (scarce.status, none.status) == (Status.WARN, Status.FAIL)
    assert (none.measured, none.unit.split()[0]) == (3, "inodes")
    assert "--inodes" in none.remedy


def test_the_worse_shortage_counts() -> None:
    assert disk(500 * MIB, inodes=3).unit.split()[0] == "inodes"
    assert disk(500 * MIB, inodes=5000).unit.split()[0] == "GiB"
    assert disk(MIB, inodes=3).unit.split()[0] == "GiB"


def test_unknown_disk() -> None:
    verdict = judge_disk(CheckedFolder("/runs/a", "run.dir", "x"), None, host="h1")
    assert (verdict.status, "/runs/a`" in verdict.remedy) == (Status.WARN, True)


def test_folders_that_are_looked_at(tmp_path: Path) -> None:
    environment = {"TMPDIR": "/var/scratch"}
    assert [one.path for one in folders_of(None, environment={})] == [tempfile.gettempdir()]
    assert [one.path for one in folders_of("s3://b/x", environment=environment)] == ["/var/scratch"]
    run, temporary = folders_of(f"{tmp_path}/a/b", environment=environment)
    assert (run.path, temporary.path) == (f"{tmp_path}/a/b", "/var/scratch")


def test_reading_a_real_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    space = read_space(f"{tmp_path}/not/yet", mounts=[])
    assert space is not None
    assert space.path == str(tmp_path)
    assert space.total_bytes >= space.free_bytes > 0
    assert read_space("\0", mounts=[]) is None


def test_the_kind_of_a_file_system(make_host: HostMaker, tmp_path: Path) -> None:
    host = make_host({"proc/self/mountinfo": f"1 0 0:1 / {tmp_path} rw - tmpfs tmpfs rw\n"})
    space = read_space(str(tmp_path), mounts=read_mounts(host.root))
    assert space is not None
    assert space.kind == "tmpfs"


def shared(total: int, free: int, *, kind: str | None = "tmpfs") -> Verdict:
    return judge_shared_memory("/dev/shm", Space("/dev/shm", total, free, 10, kind), host="h1")


def test_shared_memory() -> None:
    assert shared(100 * GIB, 90 * GIB).status is Status.PASS
    assert shared(100 * GIB, 90 * GIB, kind=None).status is Status.PASS


def test_shared_memory_of_a_container() -> None:
    verdict = shared(64 * MIB, 63 * MIB)
    assert (verdict.status, verdict.expected) == (Status.WARN, 16)
    assert "--shm-size=16g" in verdict.remedy
    assert "remount,size=16g /dev/shm" in verdict.remedy


def test_shared_memory_is_full() -> None:
    verdict = shared(30 * GIB, MIB)
    assert verdict.status is Status.FAIL
    assert "`ls -la" in verdict.remedy


def test_shared_memory_on_a_disk() -> None:
    verdict = shared(30 * GIB, 20 * GIB, kind="ext4")
    assert (verdict.status, "ext4" in str(verdict.measured)) == (Status.WARN, True)


def test_unknown_shared_memory() -> None:
    assert judge_shared_memory("/x", None, host="h1").status is Status.WARN
