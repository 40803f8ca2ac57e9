"""The state of a loop of one's own: names, first values, and what comes back, compared with what torch itself restores."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel

from elastictrain.checkpoint.manifest import StateCounters
from elastictrain.errors import ConfigError
from elastictrain.own_loop.state import JSON, OwnState, own_state

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
    "fused": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "adam-tensor-rate": lambda parameters: Adam(parameters, lr=torch.tensor(0.1)),
    "nadam": lambda parameters: NAdam(parameters, lr=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "lbfgs-like": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


class Program:
    """A small training program; `state` is None where torch alone is used."""

    def __init__(self, make: Make, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = make(self.model.parameters())
        self.scheduler = CosineAnnealingLR(self.optimizer, 10)
        self.average = AveragedModel(self.model)
        extra = {"scheduler": self.scheduler, "average": self.average}
        self.state = own_state(self.model, self.optimizer, extra)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            loss = self.model(inputs).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            losses.append(float(loss.detach()))
        return losses

    def values(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state.tensors().items()}


def give(state: OwnState, values: dict[str, Tensor]) -> None:
    """What a restore does."""
    state.make_room()
    tensors = state.tensors()
    assert tensors.keys() == values.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
    state.adopt(StateCounters(3))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_restored_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    whole = Program(OPTIMIZERS[kind])
    whole.train(0, 3)
    saved = whole.values()
    expected = whole.train(3, 8)
    other = Program(OPTIMIZERS[kind], seed=1)
    give(other.state, saved)
    assert other.train(3, 8) == expected
    assert (other.state.step, other.scheduler.last_epoch) == (3, 8)
    ours, theirs = whole.values(), other.values()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_start_from_nothing_is_that_of_the_program_alone(kind: str) -> None:
    alone, ours = Program(OPTIMIZERS[kind]), Program(OPTIMIZERS[kind])
    before = copy.deepcopy(ours.model.state_dict())
    ours.state.make_room()
    ours.state.forget()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.model.state_dict().items())
    assert ours.train(0, 4) == alone.train(0, 4)


def test_names() -> None:
    names = {"gen": nn.Linear(2, 2, bias=False), "critic": nn.Linear(2, 1, bias=False)}
    optimizers = {key: AdamW(model.parameters()) for key, model in names.items()}
    state = own_state(names, optimizers, {"noise": torch.zeros(3)})
    state.make_room()
    of_state = {f"optim.{key}.{kind}.{key}.weight" for key in names for kind in ("step", "exp_avg", "exp_avg_sq")}
    assert state.tensors().keys() == {"model.gen.weight", "model.critic.weight", "extra.noise", JSON} | of_state
    assert state.changed_by_forward() == {"extra.noise", JSON}


def test_a_parameter_without_gradient_gets_its_state_later() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    optimizer = AdamW(model.parameters())
    state = own_state(model, optimizer, None)
    state.make_room()
    expected = state.tensors().keys()
    state.forget()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert state.tensors().keys() != expected
    before = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    state.make_room()
    assert state.tensors().keys() == expected
    assert all(torch.equal(state.tensors()[name], tensor) for name, tensor in before.items() if name != JSON)


@pytest.mark.parametrize("saved_at", [None, 1, 3])
@pytest.mark.parametrize("kind", ["adamw", "nadam", "momentum"])
def test_a_late_gradient_is_that_of_the_program_alone(kind: str, saved_at: int | None) -> None:
    def train(model: nn.ModuleList, optimizer: Optimizer, steps: range, state: OwnState | None) -> None:
        for step in steps:
            optimizer.zero_grad()
            model[int(step % 3 == 2)](torch.ones(1, 2)).sum().backward()
            if state is not None:
                state.before_update(optimizer)
            optimizer.step()
            if state is not None:
                state.make_room()

    def make() -> tuple[nn.ModuleList, Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        return model, OPTIMIZERS[kind](model.parameters())

    alone, ours = make(), make()
    train(*alone, range(7), None)
    state = own_state(*ours, None)
    state.make_room()
    state.forget()
    train(*ours, range(saved_at or 7), state)
    if saved_at is not None:
        saved = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
        ours = make()
        state = own_state(*ours, None)
        give(state, saved)
        train(*ours, range(saved_at, 7), state)
    assert all(torch.equal(one, other) for one, other in zip(alone[0].parameters(), ours[0].parameters(), strict=True))


def test_state_that_was_there_before_a_new_run_stays() -> None:
    program = Program(OPTIMIZERS["adamw"])
    program.train(0, 3)
    before = program.values()
    program.state.make_room()
    program.state.forget()
    after = program.values()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tensors_that_come_later_are_refused() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    state = own_state(model, optimizer, None)
    state.make_room()
    state.fix_shapes()
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"optim\.exp_avg\.bias"):
        state.tensors()


def test_what_no_optimizer_updates_may_change_at_any_time() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert own_state(model, None, None).changed_by_forward() == {"model.weight", JSON}


def test_an_extra_that_the_checkpoint_lacks_is_named() -> None:
    model = nn.Linear(2, 1)
    saved = own_state(model, None, {"a": Stateful(1)}).tensors()
    with pytest.raises(ConfigError) as caught:
        give(own_state(model, None, {"a": Stateful(1), "b": Stateful(2)}), saved)
    assert caught.value.problems[0].key == "extra.b"
    saved = own_state(model, None, {"a": Stateful(torch.ones(2))}).tensors()
    late = own_state(model, None, {"a": Stateful(None)})
    late.tensors()
    late._given[JSON] = saved[JSON]
    with pytest.raises(ConfigError) as caught:
        late.adopt(StateCounters(1))
    assert caught.value.problems[0].key == "extra.a"


class Stateful:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


MODEL = nn.Linear(1, 1)
EXPANDED = nn.Linear(1, 1)
EXPANDED.register_buffer("mask", torch.zeros(1, 3).expand(2, 3))
WRONG = {
    "expanded": (lambda: own_state(EXPANDED, None, None), "model.mask"),
    "model": (lambda: own_state("x", None, None), "model"),
    "models": (lambda: own_state({}, None, None), "model"),
    "optimizer": (lambda: own_state(MODEL, MODEL, None), "optimizer"),
    "foreign": (lambda: own_state(MODEL, AdamW(nn.Linear(2, 2).parameters()), None), "optimizer"),
    "extra": (lambda: own_state(MODEL, None, {"a": 3}), "extra.a"),
    "extras": (lambda: own_state(MODEL, None, [MODEL]), "extra"),  # type: ignore[arg-type]
    "pickle": (lambda: own_state(MODEL, None, {"a": Stateful(print)}).tensors(), "extra.a"),
    "long": (lambda: own_state(MODEL, None, {"a": Stateful("x" * 70000)}).tensors(), "extra"),
    "closure": (lambda: own_state(MODEL, torch.optim.LBFGS(MODEL.parameters()), None).make_room(), "optimizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_name_the_argument(name: str) -> None:
    act, argument = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        act()
    (problem,) = caught.value.problems
    assert problem.key == argument


def test_a_scheduler_with_a_function_has_no_state_of_it() -> None:
    optimizer = SGD(MODEL.parameters(), lr=1.0)
    state = own_state(MODEL, optimizer, {"scheduler": LambdaLR(optimizer, lambda step: 1 / (step + 1))})
    assert JSON in state.tensors()
