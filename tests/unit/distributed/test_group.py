import json

import pytest
import torch
import torch.distributed as dist

from elastictrain.distributed.group import connect, flight_recorder, leave, make_group, tighten
from elastictrain.errors import TransportError
from elastictrain.identity import Identity

ALONE = Identity(0, 1, 0, 1, 0, "here", launched=False)


def test_a_world_of_one_needs_no_rendezvous() -> None:
    assert isinstance(connect(ALONE, timeout_s=1.0), dist.HashStore)


def test_a_store_that_nobody_named_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TransportError, match="MASTER_ADDR"):
        connect(Identity(0, 2, 0, 1, 0, "here", launched=True), timeout_s=1.0)


def test_groups_come_and_go_over_one_store_that_keeps_everything() -> None:
    store = dist.HashStore()
    for incarnation in ("000001-aa", "000002-bb"):
        group = make_group(store, ALONE, incarnation=incarnation, backend="gloo", init_timeout_s=30.0)
        try:
            assert group.device == torch.device("cpu")
            assert group.backend == "gloo"
            assert dist.get_world_size(group.control) == 1
            figures = torch.ones(3)
            dist.all_reduce(figures)
            group.store.set("key", incarnation)
            assert store.get(f"elastictrain/{incarnation}/key") == incarnation.encode()
        finally:
            leave(group)
        assert not dist.is_initialized()


def test_tight_bounds_reach_the_training_group(group_of_one: dist.HashStore) -> None:
    tighten(step_timeout_s=12.5)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 12.5


def test_the_flight_recorder_gives_json_or_nothing(group_of_one: dist.HashStore) -> None:
    dist.all_reduce(torch.ones(1))
    trace = flight_recorder()
    assert trace is None or "entries" in json.loads(trace)
