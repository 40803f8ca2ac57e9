from collections.abc import Mapping

import pytest

from elastictrain.launch.cluster.detect import detect
from tests.unit.launch.cluster.environments import (
    SHELL,
    SLURM_BATCH_SCRIPT,
    SLURM_HETEROGENEOUS,
    SLURM_INTERACTIVE,
    SLURM_TASK_PER_GPU,
    SLURM_TASK_PER_NODE,
)
from tests.unit.launch.cluster.refusals import refused, told, without


def test_one_task_per_node() -> None:
    place = detect(SLURM_TASK_PER_NODE)
    assert (place.kind, place.role, place.order, place.num_hosts, place.processes) == ("slurm", "launcher", 2, 4, 8)
    assert place.peers == ("gnode10", "gnode20", "gnode37")
    assert (place.deadline, place.job, place.address) == (1900003600.0, "200505", "")
    assert place.warnings == ()


def test_conclusions_name_the_variables() -> None:
    assert detect(SLURM_TASK_PER_NODE).conclusions == (
        "Slurm (SLURM_JOB_ID=200505)",
        "4 hosts (SLURM_STEP_NODELIST=gnode[10,20,25,37])",
        "this is host 2 (SLURM_NODEID), counted from 0",
        "8 workers, one for each GPU (SLURM_GPUS_ON_NODE=8)",
        "the job ends at 2030-03-17 18:46:40 UTC (SLURM_JOB_END_TIME=1900003600)",
    )


def test_of_one_task_per_gpu_the_first_of_the_host_launches() -> None:
    first = SLURM_TASK_PER_GPU | {"SLURM_LOCALID": "0", "SLURM_PROCID": "8"}
    place = detect(first)
    assert (place.role, place.order, place.num_hosts, place.processes) == ("launcher", 2, 3, 3)
    assert place.peers == ("rack1gpu01", "rack1gpu02")
    idle = detect(SLURM_TASK_PER_GPU)
    assert (idle.role, idle.order, idle.num_hosts) == ("idle", 2, 3)
    assert any("SLURM_LOCALID=0 launches" in sentence for sentence in idle.conclusions)


def test_tasks_are_those_of_this_host_not_of_the_first() -> None:
    on_first = SLURM_TASK_PER_GPU | {
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "rack1gpu01",
        "SLURM_LOCALID": "3",
        "SLURM_PROCID": "3",
        "SLURM_GPUS_ON_NODE": "4",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    assert detect(on_first).processes == 4


def test_a_launcher_that_would_see_one_gpu_of_many_is_refused() -> None:
    said = refused(SLURM_TASK_PER_GPU | {"CUDA_VISIBLE_DEVICES": "1"})
    assert said.keys() == {"CUDA_VISIBLE_DEVICES"}
    assert "--gpu-bind=none" in said["CUDA_VISIBLE_DEVICES"]
    assert "3 tasks" in said["CUDA_VISIBLE_DEVICES"]


def test_a_batch_script_on_one_host_needs_no_srun() -> None:
    place = detect(SLURM_BATCH_SCRIPT)
    # Its 16 "tasks" are a way to ask for CPUs: nobody has started them.
    assert (place.role, place.order, place.num_hosts, place.processes) == ("launcher", 0, 1, 4)
    assert (place.peers, place.warnings) == ((), ())
    assert told(place.conclusions, "SLURM_RESTART_COUNT=2")


@pytest.mark.parametrize("step", ["4294967291", "-5"])
def test_the_step_of_a_batch_script_is_none(step: str) -> None:
    assert detect(SLURM_BATCH_SCRIPT | {"SLURM_STEP_ID": step}) == detect(SLURM_BATCH_SCRIPT)


@pytest.mark.parametrize("environment", [SLURM_INTERACTIVE, SLURM_BATCH_SCRIPT | {"SLURM_JOB_NUM_NODES": "2"}])
def test_without_srun_the_other_hosts_would_have_no_launcher(environment: Mapping[str, str]) -> None:
    said = refused(environment)
    assert said.keys() == {"SLURM_STEP_ID"}
    assert "SLURM_JOB_NUM_NODES=2" in said["SLURM_STEP_ID"]
    assert "srun --ntasks-per-node=1" in said["SLURM_STEP_ID"]


def test_an_interactive_shell_on_one_host() -> None:
    place = detect(SLURM_INTERACTIVE | {"SLURM_JOB_NUM_NODES": "1"})
    assert (place.num_hosts, place.processes) == (1, 8)


def test_the_shell_of_salloc_is_on_no_host_of_the_job() -> None:
    said = refused(SHELL | {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert said.keys() == {"SLURM_NODEID"}
    assert "srun" in said["SLURM_NODEID"]


def test_heterogeneous_jobs_are_one_list_of_hosts() -> None:
    place = detect(SLURM_HETEROGENEOUS)
    assert (place.order, place.num_hosts, place.peers) == (1, 3, ("nid00001", "nid00012"))
    assert [warning for warning in place.warnings if "hosts" in warning] == []


def test_a_step_of_one_component_leaves_hosts_out() -> None:
    component = SLURM_HETEROGENEOUS | {
        "SLURM_STEP_NODELIST": "nid[00011-00012]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
    }
    place = detect(component)
    assert (place.order, place.num_hosts) == (0, 2)
    assert told(place.warnings, "3 hosts", "only 2", "--het-group=0-1")


def test_a_step_that_is_smaller_than_its_job_is_told() -> None:
    assert told(detect(SLURM_TASK_PER_GPU).warnings, "4 hosts", "only 3")


def test_without_an_end_of_the_job_a_signal_is_advised() -> None:
    place = detect(SLURM_TASK_PER_GPU)
    assert place.deadline is None
    assert any("--signal=USR1@300" in warning for warning in place.warnings)


def test_older_names_do() -> None:
    old = without(SLURM_TASK_PER_NODE, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES")
    old = without(old, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
    place = detect(old)
    assert (place.order, place.num_hosts, place.processes, place.job) == (2, 4, 8, "200505")
    assert len(place.peers) == 3


def test_without_a_list_of_hosts_their_number_is_enough() -> None:
    place = detect(without(SLURM_TASK_PER_NODE, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))
    assert (place.order, place.num_hosts, place.peers) == (2, 4, ())


@pytest.mark.parametrize(
    ("change", "processes"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_GPUS_PER_TASK": "gpu:2"}, 2),
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
    ],
)
def test_gpus_of_a_host(change: Mapping[str, str], processes: int) -> None:
    bare = without(SLURM_TASK_PER_NODE, "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
    assert detect(bare | change).processes == processes


@pytest.mark.parametrize(
    ("mask", "processes"),
    [("0,1", 2), ("GPU-3f2a,GPU-77aa,MIG-1", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,1,2,3,4,5,6,7,8", 8)],
)
def test_hidden_gpus_get_no_worker(mask: str, processes: int) -> None:
    assert detect(SLURM_TASK_PER_NODE | {"CUDA_VISIBLE_DEVICES": mask}).processes == processes


def test_tasks_without_gpus_are_workers() -> None:
    cpus = without(SLURM_TASK_PER_GPU, "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")
    assert detect(cpus).processes == 3


def test_tasks_that_leave_gpus_idle_are_told() -> None:
    place = detect(SLURM_TASK_PER_GPU | {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert place.processes == 3
    assert told(place.warnings, "3 tasks", "8 GPUs", "SLURM_GPUS_ON_NODE=8")


def test_gpus_of_several_tasks_add_up() -> None:
    place = detect(
        without(SLURM_TASK_PER_GPU, "SLURM_GPUS_ON_NODE") | {"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    )
    assert told(place.warnings, "3 tasks", "6 GPUs", "SLURM_GPUS_PER_TASK=2")


def test_cpus_that_srun_did_not_take_over_are_told() -> None:
    (warning,) = detect(SLURM_TASK_PER_NODE | {"SLURM_CPUS_ON_NODE": "1"}).warnings
    assert warning.startswith("1 CPU (SLURM_CPUS_ON_NODE) for 8 workers: give --cpus-per-task to srun")


def test_an_array_of_jobs_needs_folders_of_their_own() -> None:
    (warning,) = detect(SLURM_TASK_PER_NODE | {"SLURM_ARRAY_TASK_ID": "3"}).warnings
    assert "SLURM_ARRAY_TASK_ID=3" in warning


@pytest.mark.parametrize(
    ("change", "name", "messages"),
    [
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID", "must be < 4, the hosts of SLURM_STEP_NODELIST, in the environment, but is 4"),
        ({"SLURM_NODEID": "two"}, "SLURM_NODEID", "must be a whole number >= 0 in the environment, but is 'two'"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID", "but is ''"),
        ({"SLURMD_NODENAME": "gnode11"}, "SLURMD_NODENAME", "must be one of SLURM_STEP_NODELIST=gnode[10,20,25,37]"),
        ({"SLURM_STEP_NODELIST": "gnode[10,20"}, "SLURM_STEP_NODELIST", "must be a list of hosts like gpu[001-003,7],login1"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST", "a name is empty"),
        ({"SLURM_STEP_NODELIST": "gnode[10,20,25]"}, "SLURM_STEP_NODELIST", "must name the 4 hosts of SLURM_STEP_NUM_NODES"),
        ({"SLURM_STEP_NUM_NODES": "0"}, "SLURM_STEP_NUM_NODES", "must be a whole number >= 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "SLURM_STEP_TASKS_PER_NODE", "must be numbers of tasks for each of 4 hosts"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x2),0,1"},
            "SLURM_STEP_TASKS_PER_NODE",
            "must be numbers of tasks for each of 4 hosts",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "one"}, "SLURM_STEP_TASKS_PER_NODE", "must be numbers of tasks like 4(x2),3"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID", "must be < 1, the tasks of this host"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID", "must be < 4, the tasks of SLURM_STEP_NUM_TASKS"),
        ({"SLURM_GPUS_ON_NODE": "eight"}, "SLURM_GPUS_ON_NODE", "must be a whole number >= 0"),
        ({"SLURM_JOB_END_TIME": "tomorrow"}, "SLURM_JOB_END_TIME", "must be a whole number >= 1"),
        ({"SLURM_JOB_END_TIME": "1899999999"}, "SLURM_JOB_END_TIME", "must be > SLURM_JOB_START_TIME=1900000000"),
        ({"SLURM_JOB_END_TIME": "9" * 17}, "SLURM_JOB_END_TIME", "must be a time in seconds since 1970"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID", "must be the number of a step"),
        ({"SLURM_CPUS_ON_NODE": "many"}, "SLURM_CPUS_ON_NODE", "must be a whole number >= 1"),
    ],
)
def test_a_contradiction_is_refused_by_name(change: Mapping[str, str], name: str, messages: str) -> None:
    said = refused(SLURM_TASK_PER_NODE | change)
    assert messages in said[name]


@pytest.mark.parametrize(
    ("environment", "name", "messages"),
    [
        (
            without(SLURM_TASK_PER_NODE, "SLURM_NODEID"),
            "SLURM_NODEID",
            "must be set for each task of a step in the environment",
        ),
        (without(SLURM_TASK_PER_GPU, "SLURM_LOCALID"), "SLURM_LOCALID", "must be set where 3 tasks"),
        (
            without(SLURM_BATCH_SCRIPT, "SLURM_GPUS_ON_NODE") | {"SLURM_GPUS_PER_NODE": "a100:all"},
            "SLURM_GPUS_PER_NODE",
            "must be a number of GPUs like 8 or a100:8 in the environment, but is 'a100:all'",
        ),
        (
            SLURM_BATCH_SCRIPT | {"SLURM_NODEID": "1"},
            "SLURM_NODEID",
            "must be 0 for a job of one host in the environment, but is 1",
        ),
        (
            SHELL | {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"},
            "SLURM_STEP_NODELIST",
            "must be set for each task of a step in the environment",
        ),
        (
            SHELL | {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "3"},
            "SLURM_NTASKS",
            "must be a multiple of the 2 hosts",
        ),
    ],
)
def test_what_is_missing_is_refused_by_name(environment: Mapping[str, str], name: str, messages: str) -> None:
    assert messages in refused(environment)[name]


def test_tasks_that_nobody_spread_are_even() -> None:
    bare = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "8"}
    place = detect(SHELL | bare | {"SLURM_LOCALID": "3"})
    assert (place.processes, place.role) == (4, "idle")


def test_requested_tasks_of_each_node_hold_for_every_node() -> None:
    bare = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    assert detect(SHELL | bare | {"SLURM_LOCALID": "0"}).processes == 4


def test_all_contradictions_are_told_at_once() -> None:
    said = refused(SLURM_TASK_PER_NODE | {"SLURM_NODEID": "9", "SLURMD_NODENAME": "elsewhere", "SLURM_GPUS_ON_NODE": "x"})
    assert said.keys() == {"SLURM_NODEID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"}
