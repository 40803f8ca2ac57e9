from elastictrain.preflight.group.chosen import NcclChannels, Planned
from elastictrain.preflight.group.judge_transport import judge_transport
from elastictrain.preflight.verdict import Status, Verdict
from tests.unit.preflight.group.ranks import H200, members

DIRECT = NcclChannels(("IB",), (0,), True, ("P2P",))
STAGED = NcclChannels(("IB",), (0,), False, ())
SOCKET = NcclChannels(("Socket",), (0,), False, ())


def judge(first: NcclChannels, second: NcclChannels, *, planned: Planned | None) -> list[Verdict]:
    group = members("h1", "h2", device=H200, planned=planned)
    return judge_transport({0: first, 1: second}, group, seconds=0.1)


def test_as_planned() -> None:
    [passed] = judge(DIRECT, DIRECT, planned="rdma")
    assert (passed.status, passed.measured) == (Status.PASS, "NET/IB/GDRDMA+P2P")
    assert [one.status for one in judge(SOCKET, SOCKET, planned="socket")] == [Status.PASS]
    assert [one.status for one in judge(SOCKET, SOCKET, planned=None)] == [Status.PASS]


def test_a_host_on_sockets_that_should_not_be() -> None:
    [bad] = judge(DIRECT, SOCKET, planned="rdma")
    assert (bad.subject, bad.status, bad.measured, bad.expected) == ("h2", Status.WARN, "NET/Socket", "NET/IB")
    assert "on h2" in bad.remedy


def test_a_host_off_a_plan_of_sockets() -> None:
    found = judge(STAGED, STAGED, planned="socket")
    assert [(one.subject, one.status, one.expected) for one in found] == [
        ("h1", Status.WARN, "NET/Socket"),
        ("h2", Status.WARN, "NET/Socket"),
    ]
    assert "NCCL_IB_DISABLE=1" in found[0].remedy


def test_without_gpu_direct() -> None:
    [bad] = judge(STAGED, DIRECT, planned="rdma")
    assert (bad.subject, bad.status, bad.measured) == ("h1", Status.WARN, "NET/IB without GDRDMA")
    assert "nvidia_peermem" in bad.remedy


def test_a_plugin_is_taken_as_it_is() -> None:
    plugin = NcclChannels(("FasTrak",), (0,), False, ())
    assert [one.status for one in judge(plugin, plugin, planned="rdma")] == [Status.PASS]


def test_one_host_has_no_network() -> None:
    near = NcclChannels((), (), None, ("P2P",))
    [passed] = judge_transport({0: near, 1: near}, members("h1", "h1", device=H200, planned="rdma"), seconds=0.1)
    assert (passed.status, passed.measured) == (Status.PASS, "P2P")


def test_a_log_that_says_nothing_is_a_skip() -> None:
    [unread] = judge(NcclChannels(), NcclChannels(), planned="rdma")
    assert unread.status is Status.SKIP
    assert "NCCL_DEBUG_FILE" in unread.remedy
