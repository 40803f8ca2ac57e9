from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrain.errors import ConfigError
from elastictrain.launch.cluster.detect import detect
from elastictrain.launch.cluster.place import ClusterPlace
from tests.unit.launch.cluster.environments import (
    POD,
    PYTORCHJOB_19,
    RECORDED,
    RUNAI_SINGLE,
    SHELL,
    SLURM_INTERACTIVE,
    SLURM_TASK_PER_NODE,
    TORCHRUN,
    VAST,
    VAST_CREATED_ON_OVERLAY,
)
from tests.unit.launch.cluster.refusals import refused


def test_slurm_inside_kubernetes_numbers_the_hosts() -> None:
    place = detect(PYTORCHJOB_19 | SLURM_TASK_PER_NODE)
    assert (place.kind, place.order, place.num_hosts, place.processes) == ("slurm", 2, 4, 8)
    (warning,) = place.warnings
    assert "PET_NNODES" in warning
    assert "Slurm" in warning
    assert detect(POD | SLURM_TASK_PER_NODE) == detect(SLURM_TASK_PER_NODE)


def test_runai_is_kubernetes_and_more() -> None:
    assert detect(PYTORCHJOB_19 | RUNAI_SINGLE | {"RUNAI_NUM_OF_GPUS": "8"}).kind == "runai"


def test_kubernetes_comes_before_vast() -> None:
    assert detect(POD | VAST).kind == "kubernetes"


@pytest.mark.parametrize("around", [SHELL, SLURM_TASK_PER_NODE, VAST, POD])
def test_a_launcher_under_torchrun_is_refused(around: Mapping[str, str]) -> None:
    said = refused(around | TORCHRUN)
    assert said.keys() == {"TORCHELASTIC_RUN_ID"}
    assert "-m elastictrain.run" in said["TORCHELASTIC_RUN_ID"]


def test_a_launcher_for_each_process_is_refused() -> None:
    said = refused(SHELL | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert said.keys() == {"LOCAL_RANK"}
    assert detect(SHELL | {"LOCAL_RANK": "1"}).kind == "plain"


def test_every_recorded_environment_is_understood() -> None:
    kinds = {name: detect(environment).kind for name, environment in RECORDED.items()}
    assert set(kinds.values()) == {"slurm", "kubernetes", "runai", "vast", "plain"}


NAMES = sorted({name for environment in (*RECORDED.values(), SLURM_INTERACTIVE, TORCHRUN) for name in environment})
VALUES = st.one_of(
    st.sampled_from(
        ["", "0", "1", "2", "-1", "4294967290", "1(x2)", "n[1-2]", "1:4", "auto", "0.5", "C.1", "10.0.0.1", "9" * 30]
    ),
    st.integers(-3, 40).map(str),
    st.text(max_size=12),
)
INTERFACES = st.dictionaries(
    st.sampled_from(["lo", "eth0", "eth1", ""]),
    st.lists(st.one_of(st.ip_addresses().map(str), st.text(max_size=6)), max_size=2).map(tuple),
    max_size=3,
)


@given(
    st.sampled_from([*RECORDED.values(), SLURM_INTERACTIVE]),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.sets(st.sampled_from(NAMES), max_size=6),
    INTERFACES,
)
def test_whatever_is_in_the_environment_the_answer_is_a_sound_place_or_names_a_variable(
    recorded: Mapping[str, str], changes: Mapping[str, str], missing: set[str], interfaces: Mapping[str, tuple[str, ...]]
) -> None:
    environment = {name: value for name, value in (recorded | changes).items() if name not in missing}
    probes = {"names": ("box",), "interfaces": interfaces, "default_interface": "eth1"}
    found = place_or_error(environment, probes)
    if isinstance(found, ConfigError):
        assert found.problems
        assert all("must" in problem.message for problem in found.problems)
    else:
        assert_sound(found)
        assert place_or_error(environment, probes) == found


def place_or_error(environment: Mapping[str, str], probes: Mapping[str, Any]) -> ClusterPlace | ConfigError:
    try:
        return detect(environment, **probes)
    except ConfigError as error:
        return error


def assert_sound(place: ClusterPlace) -> None:
    assert place.order >= -1
    assert place.num_hosts >= 0
    assert place.processes >= 0
    assert place.num_hosts == 0 or place.order < place.num_hosts
    assert place.num_hosts == 0 or len(place.peers) < place.num_hosts or place.order < 0
    assert place.role == "launcher" or place.kind == "slurm"
    assert place.conclusions
    assert all(sentence and "\n" not in sentence.strip() for sentence in place.warnings)


def test_an_overlay_in_any_order_of_interfaces() -> None:
    for interfaces in (VAST_CREATED_ON_OVERLAY, dict(reversed(VAST_CREATED_ON_OVERLAY.items()))):
        assert detect(VAST, interfaces=interfaces, default_interface="eth1").address == "10.0.0.1"
