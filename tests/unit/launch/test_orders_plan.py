from dataclasses import replace

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from elastictrain.identity import Launcher, read_identity
from elastictrain.launch.membership.records import Generation, GenerationMember, HostRecord
from elastictrain.launch.orders import Orders, plan_torchrun
from tests.unit.launch.membership.made import generation, record

A = GenerationMember("a-1", "a", "10.0.0.1", 4000, 8)
B = GenerationMember("b-1", "b", "10.0.0.2", 4001, 4)
HERE = replace(record("b-1"), address="10.0.0.2")


def plan(generation: Generation, here: HostRecord = HERE, *, restarted: bool = True) -> Orders:
    return plan_torchrun(
        generation,
        here,
        folder="/tmp/x/generation-7",
        pid=77,
        run_arguments=("recipe=llama_tiny", "--config-dir", "my conf"),
        restarted=restarted,
        limit_s=899.5,
    )


def group(*members: GenerationMember) -> Generation:
    return replace(generation(7, "z"), members=members, master_port=5000)


def test_one_of_two_hosts() -> None:
    orders = plan(group(A, B))
    assert orders.arguments == (
        *("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4"),
        *("--master-addr", "10.0.0.1", "--master-port", "5000", "--local-addr", "10.0.0.2"),
        *("--rdzv-conf", "timeout=960"),
        *("--max-restarts", "0", "--monitor-interval", "0.1"),
        *("--log-dir", "/tmp/x/generation-7/torchrun"),
        *("-m", "elastictrain.run", "recipe=llama_tiny", "--config-dir", "my conf"),
    )
    assert orders.environment == {
        "ELASTICTRAIN_LAUNCHER": "77",
        "ELASTICTRAIN_GENERATION": "7",
        "ELASTICTRAIN_STORE_HOST": "a",
        "ELASTICTRAIN_RESTARTED": "1",
        "ELASTICTRAIN_LAUNCH_FOLDER": "/tmp/x/generation-7",
        "ELASTICTRAIN_STOP_FILE": "/tmp/x/generation-7/stop.json",
    }
    assert orders.answer_file == "/tmp/x/generation-7/torchrun.json"
    assert (orders.processes, orders.hosts, orders.limit_s) == (4, ("a", "b"), 899.5)


def test_the_first_host_has_the_workers_that_it_says() -> None:
    arguments = plan(group(A, B), replace(HERE, host="a-1", address="10.0.0.1")).arguments
    assert arguments[:6] == ("--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "8")
    assert arguments[10:12] == ("--local-addr", "10.0.0.1")


def test_a_single_host_needs_no_network() -> None:
    arguments = plan(group(B)).arguments
    assert arguments[:12] == (
        *("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "4"),
        *("--master-addr", "127.0.0.1", "--master-port", "5000", "--local-addr", "127.0.0.1"),
    )


def test_torchrun_understands_it() -> None:
    orders = plan(group(replace(A, address="fd00::1"), B))
    options = torchrun.parse_args(list(orders.arguments))
    assert (options.nnodes, options.node_rank, options.nproc_per_node, options.max_restarts) == ("2", 1, "4", 0)
    assert options.rdzv_conf == "timeout=960"
    assert parse_rendezvous_endpoint(f"{options.master_addr}:{options.master_port}", -1) == ("fd00::1", 5000)
    assert (options.monitor_interval, options.module, options.training_script) == (0.1, True, "elastictrain.run")
    assert options.training_script_args == ["recipe=llama_tiny", "--config-dir", "my conf"]


@pytest.mark.parametrize("restarted", [True, False])
def test_workers_know_their_launcher(restarted: bool) -> None:
    orders = plan(group(A, B), restarted=restarted)
    identity = read_identity({"RANK": "8", "WORLD_SIZE": "12", **orders.environment})
    assert identity.launcher == Launcher(77, 7, restarted, "/tmp/x/generation-7")
