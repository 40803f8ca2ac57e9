import pytest

from elastictrain.preflight.group.chosen import NcclChannels, debug_variables, kinds, log_path, parse_log

IB = """\
h1:31842:31905 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.4.19<0>
h1:31842:31905 [0] NCCL INFO Using network IB
h1:31842:31905 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
h1:31842:31905 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/1(3)/GDRDMA(PCI)/Shared
h1:31842:31905 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
IB_STAGED = """\
node03:34537:34681 [0] NCCL INFO Channel 00/0 : 0[3b000] -> 1[3b000] [receive] via NET/IB/1
node03:34537:34681 [0] NCCL INFO Channel 00/0 : 1[3b000] -> 0[3b000] [send] via NET/IB/1/GDRDMA
"""
SOCKET = """\
w:73:356 [0] NCCL INFO NET/IB : No device found.
w:73:356 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
w:73:356 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
w:73:356 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
"""
OLD = "node01:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/Socket/0\n"
RCCL = "w:927:927 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0 comm 0x2083dd50 nRanks 02\n"
PLUGIN = "host:1:257 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/2/GDRDMA\n"
IBEXT = "t:987:1260 [7] NCCL INFO Channel 03/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/2\n"
NVLINK = (
    "h:1:1 [0] NCCL INFO Channel 30/0 : 0[0] -> 1[6] via P2P/CUMEM\nh:1:1 [0] NCCL INFO NVLS comm 0x55 headRank 0 nHeads 8\n"
)
POINTER = "h:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/direct pointer\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IB, NcclChannels(("IB",), (0, 1), True, ("P2P",))),
        (IB_STAGED, NcclChannels(("IB",), (1,), False, ())),
        (SOCKET, NcclChannels(("Socket",), (0,), False, ("SHM",))),
        (OLD, NcclChannels(("Socket",), (0,), False, ())),
        (RCCL, NcclChannels(("Socket",), (0,), False, ())),
        (PLUGIN, NcclChannels(("AWS Libfabric",), (2,), True, ())),
        (IBEXT, NcclChannels(("IBext_v8",), (2,), False, ())),
        (NVLINK, NcclChannels((), (), None, ("P2P",))),
        (POINTER, NcclChannels((), (), None, ("P2P",))),
        (IBEXT + SOCKET, NcclChannels(("IBext_v8", "Socket"), (0, 2), False, ("SHM",))),
    ],
)
def test_logs_of_several_versions(text: str, expected: NcclChannels) -> None:
    assert parse_log(text) == expected
    assert parse_log(text).known


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h1:1:1 [0] NCCL INFO Using network IB\n",
        "NCCL version 2.28.9+cuda13.0",
        "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET",
        "via NET/IB/0",
        "\x00\ufffd" * 50,
    ],
)
def test_nothing_is_guessed(text: str) -> None:
    assert not parse_log(text).known


def test_kinds_of_networks() -> None:
    assert kinds(["IB", "IBext_v8", "AWS Libfabric", "Libfabric"]) == {"rdma"}
    assert kinds(["Socket", "FasTrak"]) == {"socket", "FasTrak"}


def test_a_log_of_its_own_unless_somebody_wants_one() -> None:
    wanted = debug_variables("/tmp/nccl-%h-%p.txt", present={})
    assert wanted == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": "/tmp/nccl-%h-%p.txt",
    }
    assert log_path(wanted, host="h1", pid=7) == "/tmp/nccl-h1-7.txt"
    for name in wanted:
        assert debug_variables("x", present={name: "WARN"}) == {}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": "a%%%p%x"}, "a%7%x"),
        ({"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_FILE": "%h"}, "h-1"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "a", "NCCL_DEBUG_SUBSYS": "NET,ALL"}, "a"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "a", "NCCL_DEBUG_SUBSYS": "^COLL"}, "a"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "a", "NCCL_DEBUG_SUBSYS": "^INIT"}, None),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "a", "NCCL_DEBUG_SUBSYS": "COLL"}, None),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "a"}, None),
        ({"NCCL_DEBUG": "INFO"}, None),
        ({"NCCL_DEBUG_FILE": "a"}, None),
        ({}, None),
    ],
)
def test_where_nccl_writes(environment: dict[str, str], expected: str | None) -> None:
    assert log_path(environment, host="h/1", pid=7) == expected
