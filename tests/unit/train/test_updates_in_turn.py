"""Steps with several updates, as those of a GAN."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastictrain.config.optim import OptimGroup
from elastictrain.data.dataset import Batch
from elastictrain.errors import ConfigError
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.step import StepFlags, Stepper, StepResult
from elastictrain.train.task import LossOutput
from tests.unit.train.parts import GLOBAL_BATCH, Points, Squares, context_of, micro_batches, wrapped_model
from tests.unit.train.test_loop import config
from tests.unit.train.test_step import full

POINTS = Points()
SGD = OptimGroup(lr=0.1, _target_="torch.optim.SGD", arguments={"momentum": 0.9})
RATE = 0.05


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Linear(3, 1)
        self.judge = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor, *, judged: bool) -> Tensor:
        guess = self.guess(x)
        real = self.judge(torch.cat((x, y[:, None]), dim=1))
        fake = self.judge(torch.cat((x, guess.detach() if judged else guess), dim=1))
        return nn.functional.softplus(fake - real if judged else -fake).sum(dim=1)


class Gan(Squares):
    updates: Sequence[str] = ("judge", "guess")
    poison = ""

    def build_model(self) -> nn.Module:
        return Pair()

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [one for name, one in model.named_parameters() if name.startswith(update)], "update": update}
            for update in ("judge", "guess")
        ]

    def update_loss(self, update: str, model: nn.Module, batch: Batch) -> LossOutput:
        losses = model(batch["x"], batch["y"], judged=update == "judge")
        loss = losses.sum() * (math.nan if update == self.poison else 1.0)
        return LossOutput(loss, torch.tensor(float(len(losses))), {"high": (losses > 0.7).sum()} if update == "guess" else {})


class Bench:
    def __init__(self, *, kind: str = "ddp", options: OptimGroup = SGD) -> None:
        self.task = Gan()
        self.wrapped = wrapped_model(self.task, kind=kind)
        self.optimizers = make_optimizers(self.wrapped.bare, options, self.task)
        self.stepper = Stepper(context_of(config=config(steps=1), task=self.task), self.wrapped, self.optimizers)

    def step(self, step: int, sizes: Sequence[int] = (8,), idle: Sequence[int] = ()) -> StepResult:
        source = micro_batches(POINTS, step, sizes, idle=idle)
        flags = StepFlags(save=True, busy=(True,), torn=(False,))
        result = self.stepper.run(step, source, passes=len(sizes) + len(idle), rate=RATE, flags=lambda: flags).result()
        assert result.flags == flags
        assert all(parameter.grad is None for parameter in self.wrapped.bare.parameters())
        return result

    def tensors(self) -> dict[str, Tensor]:
        named = dict(self.wrapped.bare.named_parameters())
        return {name: full(one).detach().clone() for name, one in (*named.items(), *self.optimizers.tensors(named.items()))}


def by_hand(steps: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The usual loop: two optimizers in turn, and the losses of both."""
    model = wrapped_model(Gan()).bare
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=RATE, momentum=0.9) for name in Gan.updates}
    told = []
    for step in range(1, steps + 1):
        batch = POINTS.batch((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH)
        told.append([])
        for name, optimizer in optimizers.items():
            loss = model(batch["x"], batch["y"], judged=name == "judge").mean()
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(getattr(model, name).parameters(), 1.0)
            optimizer.step()
            told[-1].append(loss.item())
    return {name: one.detach() for name, one in model.named_parameters()}, told


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("sizes", "idle"), [((8,), ()), ((3, 3, 2), ()), ((4, 4), (1,))], ids=str)
def test_the_updates_are_those_of_the_usual_loop(
    group_of_one: dist.HashStore, kind: str, sizes: tuple[int, ...], idle: tuple[int, ...]
) -> None:
    bench = Bench(kind=kind)
    expected, told = by_hand(3)
    for step, losses in enumerate(told, start=1):
        result = bench.step(step, sizes, idle)
        assert result.loss == pytest.approx(sum(losses), rel=1e-5)
        assert [result.metrics[f"{name}_loss"] for name in Gan.updates] == pytest.approx(losses, rel=1e-5)
        assert set(result.metrics) == {"judge_loss", "guess_loss", "guess_high"}
        assert 0 <= result.metrics["guess_high"] <= 1
    found = bench.tensors()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [SGD, OptimGroup(lr=0.1)], ids=["sgd", "adamw"])
@pytest.mark.parametrize(("poison", "changes"), [("", {"judge", "guess"}), ("judge", set()), ("guess", {"judge"})])
def test_an_update_that_is_not_finite_is_left_out_and_so_are_those_after_it(
    group_of_one: dist.HashStore, options: OptimGroup, poison: str, changes: set[str]
) -> None:
    bench = Bench(options=options)
    bench.step(1)
    before = bench.tensors()
    bench.task.poison = poison
    assert math.isfinite(bench.step(2).loss) == (not poison)
    after = bench.tensors()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {part for part in Gan.updates if any(part in name for name in changed)} == changes


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: [{"params": model.parameters()}],
        lambda model: [{"params": model.parameters(), "update": "judge"}],
        lambda model: [
            {"params": model.guess.parameters(), "update": "guess"},
            {"params": model.judge.parameters(), "update": "x"},
        ],
    ],
)
def test_groups_must_name_the_updates(groups: Callable[[Pair], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gan, "parameter_groups", lambda self, model: groups(model))
    with pytest.raises(ConfigError, match=r"Gan\.parameter_groups"):
        make_optimizers(Pair(), SGD, Gan())


class Ungrouped(Squares):
    updates = ("one",)
    update_loss = Gan.update_loss


def test_a_task_with_updates_needs_groups() -> None:
    with pytest.raises(ConfigError, match="parameter_groups"):
        make_optimizers(Pair(), SGD, Ungrouped())
