from elastictrain.preflight.command import bus_table, pair_tables
from elastictrain.preflight.group.measurements import BandwidthPoint, PairBandwidth


def test_columns_are_those_of_nccl_tests() -> None:
    heading, small, large = bus_table([BandwidthPoint(1 << 20, 1e-4, 4), BandwidthPoint(1 << 30, 0.00325, 4)])
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
