from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elastictrain.checkpoint.manifest import StateCounters
from elastictrain.errors import ConfigError
from elastictrain.own_loop.per_rank import PerRank
from elastictrain.own_loop.state import own_state


class Loader:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        return {"inner": self.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = state["inner"]


class Drawn:
    """As grain's iterators."""

    def __init__(self, place: int) -> None:
        self.place = place

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.place}

    def set_state(self, state: dict[str, int]) -> None:
        self.place = state["next_index"]


def test_the_state_comes_back_as_it_was() -> None:
    generator = torch.Generator().manual_seed(5).get_state()
    # Also a view in the middle of a tensor, bfloat16, and nothing.
    tensors = [generator, torch.arange(6)[1:4], torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3)]
    state = {"worker_0": {"place": 7, 3: None, "pair": (1, 2.5)}, "ended": False, "tensors": tensors}
    stored = PerRank(Loader(state)).tensor("extra.x", None)
    loader = Loader(None)
    PerRank(loader).load(stored)
    found = loader.state.pop("tensors")
    assert loader.state == {name: one for name, one in state.items() if name != "tensors"}
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, tensors, strict=True))


def test_it_is_part_of_the_run() -> None:
    first, second = (own_state(nn.Linear(1, 1), None, {"it": PerRank(Drawn(place))}) for place in (41, 0))
    stored = first.tensors()
    assert tuple(stored["extra.it.per_rank"].shape) == (1, 262144)
    assert "extra.it.per_rank" in first.changed_by_forward()
    for name, tensor in second.tensors().items():
        tensor.data.copy_(stored[name])
    second.adopt(StateCounters(3))
    assert second.tensors()["extra.it.per_rank"].equal(stored["extra.it.per_rank"])


@pytest.mark.parametrize("state", [{"open": object()}, list(range(80_000))])
def test_a_state_that_cannot_be_stored_is_refused_by_its_name(state: object) -> None:
    with pytest.raises(ConfigError) as caught:
        PerRank(Loader(state)).tensor("extra.loader", None)
    assert [problem.key for problem in caught.value.problems] == ["extra.loader"]


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(ConfigError):
        PerRank(iter([1]))
