import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.distributed.running_statistics import RunningStatistics


def model() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(4))


def test_the_mean_of_all_ranks_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, of which the other two changed means by 1 and 2 more than this one."""

    def all_reduce(tensor: Tensor) -> None:
        more = torch.zeros_like(tensor)
        more[:3] = 3.0
        tensor.mul_(3.0).add_(more)

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    one = model()
    statistics = RunningStatistics.of(one)
    before = statistics.copy()
    one(torch.randn(5, 2, 4))
    norm = one[1]  # type: ignore[index]
    own_mean, own_var = norm.running_mean.clone(), norm.running_var.clone()
    assert not torch.equal(own_var, before[1])
    statistics.average(before)
    torch.testing.assert_close(norm.running_mean, own_mean + 1.0)
    torch.testing.assert_close(norm.running_var, own_var)
    assert statistics.names == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_what_no_rank_changes_stays_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(3.0))
    one = model().eval()
    one[1].running_mean.normal_()  # type: ignore[index]
    statistics = RunningStatistics.of(one)
    before = statistics.copy()
    statistics.average(before)
    assert all(torch.equal(now, then) for now, then in zip(statistics.tensors, before, strict=True))


def test_a_model_without_them_and_a_world_of_one_communicate_with_nobody(
    monkeypatch: pytest.MonkeyPatch, group_of_one: object
) -> None:
    def fail(_: Tensor) -> None:
        raise AssertionError

    monkeypatch.setattr(dist, "all_reduce", fail)
    alone = RunningStatistics.of(model())
    assert alone.tensors
    alone.average(alone.copy())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    none = RunningStatistics.of(nn.Linear(2, 2))
    none.average(none.copy())
