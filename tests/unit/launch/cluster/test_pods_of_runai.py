from collections.abc import Mapping

import pytest

from elastictrain.launch.cluster.detect import detect
from tests.unit.launch.cluster.environments import POD, RUNAI_218, RUNAI_DISTRIBUTED, RUNAI_SINGLE, SHELL
from tests.unit.launch.cluster.refusals import refused, told, without


def test_one_pod() -> None:
    place = detect(RUNAI_SINGLE)
    assert (place.kind, place.order, place.num_hosts, place.processes, place.job) == ("runai", -1, 0, 4, "llama")
    assert told(place.conclusions, "RunAI", "KUBERNETES_SERVICE_HOST")
    assert told(place.conclusions, "4 workers", "RUNAI_NUM_OF_GPUS=4")


def test_a_pod_of_several() -> None:
    place = detect(RUNAI_DISTRIBUTED)
    assert (place.kind, place.order, place.num_hosts, place.processes) == ("runai", 3, 4, 8)
    assert (place.peers, place.warnings) == (("llama-master-0",), ())


def test_the_pod_index_of_a_parameter_search_numbers_no_hosts() -> None:
    assert detect(RUNAI_SINGLE | {"POD_INDEX": "7"}).order == -1


def test_known_without_its_number_of_gpus() -> None:
    place = detect(without(RUNAI_SINGLE, "RUNAI_NUM_OF_GPUS"))
    assert (place.kind, place.processes) == ("runai", 0)


def test_a_laptop_with_its_command_line_tool_is_no_pod() -> None:
    assert detect(SHELL | {"RUNAI_CLI_CONFIG_PATH": "/home/ada/.runai"}).kind == "plain"


@pytest.mark.parametrize(("text", "processes"), [("1", 1), ("8", 8), ("2.00", 2), ("0.5", 1), ("0.10", 1), ("1.0", 1)])
def test_whole_gpus_and_a_part_of_one(text: str, processes: int) -> None:
    place = detect(RUNAI_SINGLE | {"RUNAI_NUM_OF_GPUS": text})
    assert place.processes == processes
    kind = "with a part of a GPU" if float(text) < 1 else "one for each GPU"
    assert any(kind in sentence and f"(RUNAI_NUM_OF_GPUS={text})" in sentence for sentence in place.conclusions)


@pytest.mark.parametrize("text", ["0", "0.0", "", "all", "-1", "1.5", "nan", "inf", "1e2", "8 "])
def test_a_number_of_gpus_that_is_none_is_refused(text: str) -> None:
    said = refused(RUNAI_SINGLE | {"RUNAI_NUM_OF_GPUS": text})
    assert said.keys() == {"RUNAI_NUM_OF_GPUS"}
    assert text in said["RUNAI_NUM_OF_GPUS"]


def test_what_the_workload_asks_for_comes_before_its_gpus() -> None:
    place = detect(RUNAI_DISTRIBUTED | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "16"})
    assert place.processes == 4


@pytest.mark.parametrize("gpus", ["8", "0.5"])
def test_more_workers_than_gpus_are_refused(gpus: str) -> None:
    said = refused(RUNAI_DISTRIBUTED | {"PET_NPROC_PER_NODE": "16", "WORLD_SIZE": "64", "RUNAI_NUM_OF_GPUS": gpus})
    limit = "8" if gpus == "8" else "1"
    assert said.keys() == {"PET_NPROC_PER_NODE"}
    assert told(said.values(), f"<= {limit}", "RUNAI_NUM_OF_GPUS", "is 16")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"RUNAI_NUM_OF_GPUS": "x", "PET_NODE_RANK": "y"}, {"RUNAI_NUM_OF_GPUS", "PET_NODE_RANK"}),
        ({"PET_NODE_RANK": "4", "RANK": "4"}, {"PET_NODE_RANK"}),
    ],
)
def test_all_is_told_at_once(change: Mapping[str, str], names: set[str]) -> None:
    assert refused(RUNAI_DISTRIBUTED | change).keys() == names


def test_any_pod_with_a_variable_of_runai_is_one() -> None:
    assert detect(POD | {"RUNAI_PROJECT": "team-a"}).kind == "runai"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"WORLD_SIZE": "2"},
        {"PET_NODE_RANK": "1"},
        {"PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"},
        {"PET_NPROC_PER_NODE": "auto"},
        {"PET_NPROC_PER_NODE": "gpu", "WORLD_SIZE": "2"},
        {"RUNAI_NUM_OF_GPUS": "4.00"},
    ],
)
def test_pods_whose_ranks_number_pods_and_whose_world_counts_gpus_or_pods(change: Mapping[str, str]) -> None:
    place = detect(RUNAI_218 | change)
    assert (place.kind, place.order, place.num_hosts, place.processes) == ("runai", 1, 2, 4)
    assert (place.peers, place.warnings) == (("llama-master-0",), ())
    master = detect(RUNAI_218 | change | {"RANK": "0"} | ({"PET_NODE_RANK": "0"} if "PET_NODE_RANK" in change else {}))
    assert (master.order, master.num_hosts, master.processes, master.peers) == (0, 2, 4, ())


def test_fewer_workers_than_gpus_count_too() -> None:
    place = detect(RUNAI_218 | {"PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4"})
    assert (place.num_hosts, place.processes) == (2, 2)


def test_a_world_without_a_number_of_pods_is_taken_for_one_with_a_warning() -> None:
    place = detect(without(RUNAI_218, "PET_NNODES"))
    assert (place.order, place.num_hosts, place.processes) == (1, 8, 4)
    (warning,) = place.warnings
    assert "PET_NNODES=2" in warning
    assert detect(without(RUNAI_218, "PET_NNODES") | {"WORLD_SIZE": "2"}).warnings == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"WORLD_SIZE": "6"},
            {"WORLD_SIZE": "must be 2 or 8 (PET_NNODES=2, RUNAI_NUM_OF_GPUS=4) in the environment, but is 6"},
        ),
        ({"RANK": "2"}, {"RANK": "must be < 2, the hosts of PET_NNODES, in the environment, but is 2"}),
        (
            {"PET_NODE_RANK": "0"},
            {"RANK": "must be 0, the pod's number in PET_NODE_RANK, in the environment, but is 1"},
        ),
        (
            {"PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "6"},
            {
                "WORLD_SIZE": "must be 2 or 4 or 8 (PET_NNODES=2, PET_NPROC_PER_NODE=2, RUNAI_NUM_OF_GPUS=4) in the "
                "environment, but is 6"
            },
        ),
    ],
)
def test_values_that_contradict_each_other_are_named_with_their_values(
    change: Mapping[str, str], said: Mapping[str, str]
) -> None:
    assert refused(RUNAI_218 | change) == said


def test_a_launcher_for_each_gpu_of_a_pod_is_refused() -> None:
    assert refused(RUNAI_218 | {"LOCAL_RANK": "1"}).keys() == {"LOCAL_RANK"}
    assert refused(RUNAI_218 | {"TORCHELASTIC_RUN_ID": "none"}).keys() == {"TORCHELASTIC_RUN_ID"}
    assert refused(SHELL | {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}).keys() == {"LOCAL_RANK"}
