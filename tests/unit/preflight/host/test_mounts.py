from elastictrain.preflight.host.mounts import mount_of, parse_mounts

TEXT = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
40 27 0:40 /exports/run /mnt/my\\040runs rw master:7 propagate_from:2 - nfs4 server:/exports rw,hard,vers=4.2
41 40 0:41 / /mnt/my\\040runs/fast rw - tmpfs tmpfs ro,size=4k
43 27 0:43 / /mnt/my rw - ext4 /dev/vdb
"""


def test_parsing() -> None:
    mounts = parse_mounts(TEXT)
    assert [mount.point for mount in mounts] == ["/proc", "/", "/mnt/my runs", "/mnt/my runs/fast", "/mnt/my"]
    assert mounts[2].root == "/exports/run"
    assert mounts[2].kind == "nfs4"
    assert "hard" in mounts[2].options


def test_innermost_mount_counts() -> None:
    mounts = parse_mounts(TEXT)
    found = {
        path: mount_of(path, mounts) for path in ("/mnt/my runs/fast/x", "/mnt/my runs/fastest", "/mnt/mystery", "/mnt/my")
    }
    assert [mount and mount.point for mount in found.values()] == ["/mnt/my runs/fast", "/mnt/my runs", "/", "/mnt/my"]


def test_later_mount_hides_the_earlier_one() -> None:
    mounts = parse_mounts("1 0 0:1 / /x rw - ext4 a rw\n2 0 0:2 / /x rw - tmpfs b rw\n")
    mount = mount_of("/x/y", mounts)
    assert mount is not None
    assert mount.kind == "tmpfs"


def test_nothing_known() -> None:
    assert parse_mounts("no mounts here\n1 2 3 - \n - ext4 x\n") == []
    assert mount_of("/x", []) is None
