from dataclasses import replace

import pytest

from elastictrain.preflight.group.members import Planned
from elastictrain.preflight.group.nccl_transport import (
    NcclChannels,
    debug_variables,
    judge_transport,
    kinds,
    log_path,
    parse_log,
)
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.group.ranks import H200, members

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
CHOSEN = """\
h:1:1 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
h:1:1 [0] NCCL INFO Connected all trees
h:1:1 [0] NCCL INFO Connected NVLS tree
h:1:1 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
"""
POINTER = "h:1:1 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/direct pointer\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IB, NcclChannels(("IB",), True, ("P2P",))),
        (IB_STAGED, NcclChannels(("IB",), False, ())),
        (SOCKET, NcclChannels(("Socket",), False, ("SHM",), ("rings",))),
        (CHOSEN, NcclChannels(algorithms=("NVLS", "rings", "trees"), count=24)),
        (OLD, NcclChannels(("Socket",), False, ())),
        (RCCL, NcclChannels(("Socket",), False, ())),
        (PLUGIN, NcclChannels(("AWS Libfabric",), True, ())),
        (IBEXT, NcclChannels(("IBext_v8",), False, ())),
        (NVLINK, NcclChannels((), None, ("P2P",))),
        (POINTER, NcclChannels((), None, ("P2P",))),
        (IBEXT + SOCKET, NcclChannels(("IBext_v8", "Socket"), False, ("SHM",), ("rings",))),
    ],
)
def test_logs_of_several_versions(text: str, expected: NcclChannels) -> None:
    assert parse_log(text) == expected
    assert parse_log(text) != NcclChannels()


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
    assert parse_log(text) == NcclChannels()


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


DIRECT = NcclChannels(("IB",), True, ("P2P",))
STAGED = NcclChannels(("IB",), False, ())
SOCKET_CHANNELS = NcclChannels(("Socket",), False, ())


def judge(first: NcclChannels, second: NcclChannels, *, planned: Planned | None) -> list[Verdict]:
    group = members("h1", "h2", device=H200, planned=planned)
    return judge_transport({0: first, 1: second}, group)


def test_as_planned() -> None:
    [passed] = judge(DIRECT, DIRECT, planned="rdma")
    assert (passed.status, passed.measured) == (Status.PASS, "NET/IB/GDRDMA+P2P")
    assert [one.status for one in judge(SOCKET_CHANNELS, SOCKET_CHANNELS, planned="socket")] == [Status.PASS]
    assert [one.status for one in judge(SOCKET_CHANNELS, SOCKET_CHANNELS, planned=None)] == [Status.PASS]


def test_what_nccl_chose_is_shown() -> None:
    channels = replace(DIRECT, algorithms=("rings", "trees"), count=24)
    [found] = judge(channels, channels, planned="rdma")
    assert (found.status, found.measured) == (Status.PASS, "NET/IB/GDRDMA+P2P (rings, trees, 24 channels)")


def test_a_host_on_sockets_that_should_not_be() -> None:
    [bad] = judge(DIRECT, SOCKET_CHANNELS, planned="rdma")
    assert (bad.subject, bad.status, bad.measured, bad.expected) == ("h2", Status.FAIL, "NET/Socket", "NET/IB")
    assert "on h2" in bad.remedy


def test_a_host_off_a_plan_of_sockets() -> None:
    found = judge(STAGED, STAGED, planned="socket")
    assert [(one.subject, one.status, one.expected) for one in found] == [
        ("h1", Status.FAIL, "NET/Socket"),
        ("h2", Status.FAIL, "NET/Socket"),
    ]
    assert "NCCL_IB_DISABLE=1" in found[0].remedy


def test_without_gpu_direct() -> None:
    [bad] = judge(STAGED, DIRECT, planned="rdma")
    assert (bad.subject, bad.status, "GDRDMA" in str(bad.expected)) == ("h1", Status.FAIL, True)
    assert "nvidia_peermem" in bad.remedy


def test_a_plugin_is_taken_as_it_is() -> None:
    plugin = NcclChannels(("FasTrak",), False, ())
    assert [one.status for one in judge(plugin, plugin, planned="rdma")] == [Status.PASS]


def test_one_host_has_no_network() -> None:
    near = NcclChannels((), None, ("P2P",))
    [passed] = judge_transport({0: near, 1: near}, members("h1", "h1", device=H200, planned="rdma"))
    assert (passed.status, passed.measured) == (Status.PASS, "P2P")


def test_a_log_that_says_nothing_is_a_skip() -> None:
    [unread] = judge(NcclChannels(), NcclChannels(), planned="rdma")
    assert unread.status is Status.SKIP
    assert "NCCL_DEBUG_FILE" in unread.remedy
