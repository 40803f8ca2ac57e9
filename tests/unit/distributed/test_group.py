import json
import threading
import time

import pytest
import torch
import torch.distributed as dist

from elastictrain.distributed.group import connect, leave, limit_collectives, lone_group, make_group
from elastictrain.distributed.store import PolledStore
from elastictrain.errors import TransportError
from elastictrain.identity import Identity, Launcher
from elastictrain.net.listening import bind_everywhere
from elastictrain.torch_private import flight_recorder
from elastictrain.torch_private_groups import forget_groups

ALONE = Identity(0, 1, 0, 1, "here", launched=False)


def test_a_world_of_one_needs_no_rendezvous() -> None:
    assert isinstance(connect(ALONE, timeout_s=1.0), dist.HashStore)


def test_a_store_that_nobody_named_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TransportError, match="MASTER_ADDR"):
        connect(Identity(0, 2, 0, 1, "here", launched=True), timeout_s=1.0)


def test_a_store_that_is_not_there_yet_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's client sleeps for a second after each refusal."""
    port = bind_everywhere(0)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    stores = []

    def make() -> None:
        stores.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    maker = threading.Timer(0.3, make)
    maker.start()
    began = time.monotonic()
    identity = Identity(1, 2, 0, 1, "here", launched=True, launcher=Launcher(1, 1, restarted=False, folder="/tmp/x"))
    connect(identity, timeout_s=20.0).set("key", "value")
    assert time.monotonic() - began < 0.9
    # It answers before its constructor has returned.
    maker.join(10)
    assert stores[0].get("key") == b"value"


def test_groups_come_and_go_over_one_store_that_keeps_everything() -> None:
    store = dist.HashStore()
    for incarnation in ("000001-aa", "000002-bb"):
        fresh = dist.PrefixStore(incarnation, store)
        group = make_group(fresh, ALONE, backend="gloo", init_timeout_s=30.0, save_timeout_s=60.0)
        try:
            assert group.device == torch.device("cpu")
            assert group.backend == "gloo"
            assert dist.get_world_size(group.control) == 1
            figures = torch.ones(3)
            dist.all_reduce(figures)
            fresh.set("key", incarnation)
            assert store.get(f"{incarnation}/key") == incarnation.encode()
        finally:
            leave(group)
        assert not dist.is_initialized()


def timeout_s(group: dist.ProcessGroup | None = None) -> float:
    group = group or dist.distributed_c10d._get_default_group()
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


@pytest.mark.parametrize(("save_timeout_s", "control_s"), [(60.0, 60.0), (10.0, 30.0)])
def test_the_control_group_waits_as_long_as_a_save_may_take(save_timeout_s: float, control_s: float) -> None:
    group = make_group(dist.HashStore(), ALONE, backend="gloo", init_timeout_s=30.0, save_timeout_s=save_timeout_s)
    try:
        assert timeout_s() == 30.0
        assert timeout_s(group.control) == control_s
    finally:
        leave(group)


def test_bounds_reach_the_default_group_and_those_that_are_named(group_of_one: dist.HashStore) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    untouched_s = timeout_s(groups[2])
    limit_collectives((), backend="gloo", timeout_s=12.5)
    assert [timeout_s(), timeout_s(groups[0])] == [12.5, untouched_s]
    limit_collectives(groups[:2], backend="gloo", timeout_s=7.0)
    assert [timeout_s(group) for group in (None, *groups)] == [7.0, 7.0, 7.0, untouched_s]


def test_nccl_is_given_longer_so_that_ours_speaks_first(group_of_one: dist.HashStore) -> None:
    limit_collectives((), backend="nccl", timeout_s=12.5)
    assert timeout_s() > 12.5


def test_the_flight_recorder_gives_json_or_nothing(group_of_one: dist.HashStore) -> None:
    dist.all_reduce(torch.ones(1))
    trace = flight_recorder()
    assert trace is None or "entries" in json.loads(trace)


class LeftError(Exception):
    pass


def test_whoever_waits_for_a_rank_that_never_comes_can_leave() -> None:
    asked = []

    def poll() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise LeftError

    identity = Identity(0, 2, 0, 2, "here", launched=True)
    with pytest.raises(LeftError):
        make_group(dist.HashStore(), identity, backend="gloo", init_timeout_s=30.0, save_timeout_s=30.0, poll=poll)
    forget_groups()


def test_a_rank_that_never_comes_is_a_transport_error_in_time() -> None:
    store = PolledStore(dist.HashStore(), limit_s=0.01, poll=lambda: None)
    with pytest.raises(TransportError, match="rank-1"):
        store.get("rank-1")


def test_a_lone_group_plays_any_rank_of_any_world() -> None:
    group = lone_group(Identity(2, 4, 2, 4, "here", launched=True), backend="gloo", on_gpu=False)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (2, 4)
        figures = torch.ones(3)
        dist.all_reduce(figures)
        dist.all_reduce(figures, group=group.control)
        assert figures.tolist() == [1.0, 1.0, 1.0]
    finally:
        forget_groups()


def test_gloo_uses_the_device_that_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    group = make_group(dist.HashStore(), ALONE, backend="gloo", on_gpu=True, init_timeout_s=30.0, save_timeout_s=60.0)
    try:
        assert used == [group.device] == [torch.device("cuda", 0)]
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
