from collections.abc import Callable

from elastictrain.preflight.devices.nvlink import GpuLinks, Topology, judge_nvlink, parse_links, parse_topology
from elastictrain.preflight.verdict import Status, Verdict

Recorded = Callable[[str], str]


def judge(
    links: list[GpuLinks] | None, topology: Topology | None = None, *, switched: bool = True, mig: bool = False
) -> list[Verdict]:
    return judge_nvlink(links, topology, switched=switched, mig=mig, num_gpus=2, host="h1")


def test_all_links_up(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_h100.txt"))
    assert [(one.index, len(one.speeds_gbs), one.speeds_gbs[17], one.down) for one in links] == [
        (0, 18, 26.562, ()),
        (1, 18, 26.562, ()),
    ]
    (found,) = judge(links, parse_topology(recorded("topo_h100.txt")))
    assert (found.status, found.measured) == (Status.PASS, "18 links at 26.562 GB/s")


def test_links_down(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_a100_down.txt"))
    assert links[1].down == (3, 7)
    (found,) = judge(links)
    assert (found.status, found.subject, found.measured) == (Status.FAIL, "GPU 1 on h1", "10 links up, down: 3, 7")
    (bridged,) = judge(links, switched=False)
    assert bridged.status is Status.WARN


def test_a_gpu_without_any_link(recorded: Recorded) -> None:
    links = parse_links(recorded("nvlink_all_down.txt"))
    (found,) = judge(links)
    assert (found.status, found.subject, found.expected) == (Status.FAIL, "GPU 1 on h1", "18 links up")
    assert judge(links, switched=False)[0].status is Status.PASS


def test_the_same_number_down_on_all_is_a_warning() -> None:
    links = [GpuLinks(0, {0: 25.0}, (1,)), GpuLinks(1, {1: 25.0}, (0,))]
    assert [found.status for found in judge(links)] == [Status.WARN, Status.WARN]


def test_a_slow_link(recorded: Recorded) -> None:
    (found,) = judge(parse_links(recorded("nvlink_h200_slow.txt")))
    assert (found.status, found.measured, found.expected, found.unit) == (Status.WARN, "link 2: 1.562", 26.562, "GB/s")


def test_no_links_and_unknown_states(recorded: Recorded) -> None:
    assert parse_links(recorded("nvlink_l4.txt")) == []
    (found,) = judge([], Topology(("GPU0",), {("GPU0", "GPU0"): "X"}), switched=False)
    assert (found.status, found.measured) == (Status.PASS, "no NVLink in use")
    (odd,) = parse_links(recorded("nvlink_odd.txt"))
    assert (dict(odd.speeds_gbs), odd.down) == ({1: 53.125}, ())


def test_nobody_can_tell() -> None:
    assert [found.status for found in judge(None)] == [Status.SKIP]
    assert [found.status for found in judge([], None)] == [Status.SKIP]
    assert [found.status for found in judge(None, mig=True)] == [Status.SKIP]


def test_an_answer_cut_short_is_no_failure(recorded: Recorded) -> None:
    text = recorded("nvlink_h100.txt")
    (found,) = judge(parse_links(text[: text.rindex("Link 11")]))
    assert (found.status, found.measured) == (Status.WARN, "1 GPUs told all their links")


def test_a_topology_with_colours_and_nics(recorded: Recorded) -> None:
    topology = parse_topology(recorded("topo_h100.txt"))
    assert topology.devices == ("GPU0", "GPU1", "NIC0", "NIC1")
    assert topology.num_nvlinks("GPU0", "GPU1") == 18
    assert topology.between["GPU1", "NIC1"] == "PIX"
    assert topology.num_nvlinks("GPU0", "NIC0") == 0
    assert topology.num_nvlinks("GPU0", "GPU7") is None


def test_a_topology_of_an_old_driver_names_adapters(recorded: Recorded) -> None:
    topology = parse_topology(recorded("topo_470.txt"))
    assert topology.devices[4:] == ("mlx5_0", "mlx5_1")
    assert topology.num_nvlinks("GPU0", "GPU3") == 2


def test_cells_that_ran_together_are_unknown(recorded: Recorded) -> None:
    topology = parse_topology(recorded("topo_glued.txt"))
    assert topology.between["GPU0", "GPU1"] == "SYS"
    assert ("GPU0", "NIC0") not in topology.between


def test_a_pair_without_the_links_that_others_have(recorded: Recorded) -> None:
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tNV18\nGPU2\tSYS\tNV18\t X \n"
    links = parse_links(recorded("nvlink_h100.txt"))
    (found,) = judge(links, parse_topology(text))
    assert (found.status, found.subject, found.measured, found.expected) == (Status.FAIL, "GPU 0 -> GPU 2 on h1", "SYS", "NV18")
    assert judge(links, parse_topology(text), switched=False)[0].status is Status.PASS
