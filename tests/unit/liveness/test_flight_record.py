import json

import pytest

from elastictrain.liveness.flight_record import Entered, last_entered


def entry(record: int, *, group: str = "0", sequence: int, p2p: bool = False) -> dict[str, object]:
    return {
        "record_id": record,
        "is_p2p": p2p,
        "process_group": [group, "default_pg"],
        "collective_seq_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[3, 4]],
    }


def test_the_last_of_each_group_counts_and_the_newest_is_told() -> None:
    # The recorder is a ring: its entries need not be in order.
    entries = [entry(7, sequence=57), entry(5, sequence=56), entry(6, group="1", sequence=3), entry(8, sequence=99, p2p=True)]
    found = last_entered(json.dumps({"entries": entries}))
    assert found == Entered({"0": 57, "1": 3}, "nccl:all_reduce no. 57 of group 0, sizes [[3, 4]]")


@pytest.mark.parametrize("trace", ["", "{}", "[]", '{"entries": []}', '{"entries": [{}]}', '{"entries": 5}', "null"])
def test_what_is_not_understood_says_nothing(trace: str) -> None:
    assert last_entered(trace) == Entered()
