from elastictrain.preflight.command import ask_nccl_tests, bus_table, pair_tables
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth
from elastictrain.surroundings import Surroundings, ToolOutput
from tests.unit.preflight.conftest import RecordedTools

# The form of nccl-tests 2.13; the figures are made up.
NCCL_TESTS = """\
# nThread 1 nGpus 2 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 validation: 1
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    12.10    0.08    0.08      0    12.00    0.09    0.09      0
  1073741824     268435456     float     sum      -1   3250.0  330.38  330.38      0   3240.0  331.40  331.40    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 165.4
"""


def test_columns_are_those_of_nccl_tests() -> None:
    heading, small, large = bus_table([BandwidthPoint(1 << 20, 1e-4, 4), BandwidthPoint(1 << 30, 0.00325, 4)], {})
    assert len({len(heading), len(small), len(large)}) == 1
    assert small.split() == ["1", "MB", "100.0", "10.49", "15.73"]
    assert large.split() == ["1", "GB", "3250.0", "330.38", "495.57"]


def test_pairs_of_each_host_are_a_matrix() -> None:
    hosts = ["a", "b", "a", "b"]
    pairs = {
        0: [PairBandwidth(2, 20.0, None)],
        2: [PairBandwidth(0, 2.0, None)],
        1: [PairBandwidth(3, 31.0, None)],
        3: [],
    }
    rows = [line.split() for line in pair_tables(pairs, hosts)]
    assert rows[:3] == [["a,", "GB/s", "to", "0", "to", "2"], ["from", "0", "-", "2.00"], ["from", "2", "20.00", "-"]]
    assert rows[3:] == [["b,", "GB/s", "to", "1", "to", "3"], ["from", "1", "-", "-"], ["from", "3", "31.00", "-"]]
    assert list(pair_tables({}, hosts)) == []


def test_the_figures_of_nccl_tests_stand_beside_ours() -> None:
    tools = RecordedTools({"all_reduce_perf": ToolOutput(0, NCCL_TESTS, "")})
    theirs = ask_nccl_tests(Surroundings(tools=tools), num_gpus=2)
    assert (theirs, tools.asked[0].endswith("-g 2")) == ({1024: 0.09, 1 << 30: 331.4}, True)
    heading, small, large = bus_table([BandwidthPoint(1 << 20, 1e-4, 4), BandwidthPoint(1 << 30, 0.00325, 4)], theirs)
    assert (heading.split()[-1], small.split()[-1], large.split()[-1]) == ("nccl-tests", "15.73", "331.40")
    assert len(heading) == len(large)
    assert ask_nccl_tests(Surroundings(tools=RecordedTools({})), num_gpus=2) == {}
