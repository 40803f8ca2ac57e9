import pytest
import torch
from torch import Tensor, nn

from elastictrain.data.dataset import Batch
from elastictrain.errors import ConfigError, TaskError
from elastictrain.train.parameters import build_model, fill, fill_again, float8_layers, local
from elastictrain.train.task import LossOutput

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.rand(3, 2)))
        self.register_buffer("table", torch.zeros(4))


class Plain:
    """Leaves initialisation to the modules."""

    names: tuple[str, ...] = ("a", "b", "c")

    def build_model(self) -> nn.Module:
        return Net(self.names)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        raise NotImplementedError


class Filling(Plain):
    """Fills its parameters itself."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(generator=generator)

    def init_buffer(self, name: str, tensor: Tensor) -> None:
        tensor.fill_(len(name))


class Reversed(Filling):
    names = ("c", "b", "a")


class Tied(Filling):
    """One tensor under two names."""

    def build_model(self) -> nn.Module:
        net = Net(("a", "b"))
        net.register_parameter("b", net.a)
        return net


def filled(task: Plain, *, seed: int = 0) -> dict[str, Tensor]:
    model = build_model(task, seed=seed, device=CPU)
    fill(model, task, seed=seed, device=CPU)
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_a_task_that_fills_parameters_builds_on_the_meta_device() -> None:
    model = build_model(Filling(), seed=0, device=CPU)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_values_depend_on_the_name_and_not_on_the_order() -> None:
    one, other = filled(Filling()), filled(Reversed())
    assert set(one) == set(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert not torch.equal(one["a"], one["b"])


def test_values_depend_on_the_seed_and_on_nothing_drawn_before() -> None:
    one = filled(Filling())
    torch.rand(3)
    assert torch.equal(filled(Filling())["a"], one["a"])
    assert not torch.equal(filled(Filling(), seed=1)["a"], one["a"])


def test_buffers_are_filled_too() -> None:
    assert torch.equal(filled(Filling())["table"], torch.full((4,), 5.0))


def test_other_tasks_are_initialised_by_their_modules_the_same_on_every_rank() -> None:
    torch.manual_seed(1)
    one = filled(Plain())
    torch.manual_seed(2)
    assert torch.equal(filled(Plain())["a"], one["a"])
    assert not torch.equal(filled(Plain(), seed=1)["a"], one["a"])


def test_parameters_that_are_tied_stay_tied() -> None:
    model = build_model(Tied(), seed=0, device=CPU)
    fill(model, Tied(), seed=0, device=CPU)
    assert [name for name, _ in model.named_parameters()] == ["a"]
    assert model.a is model.b


@pytest.mark.parametrize("task", [Plain(), Filling(), Tied()], ids=["plain", "filling", "tied"])
def test_a_model_gets_its_first_values_again(task: Plain) -> None:
    model = build_model(task, seed=3, device=CPU)
    fill(model, task, seed=3, device=CPU)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(7)
    torch.rand(3)
    fill_again(model, task, seed=3, device=CPU)
    # The same tensors, which an optimizer knows.
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
        assert torch.equal(tensor, first[name]), name


def test_what_is_no_shard_is_its_own_local_part() -> None:
    tensor = torch.ones(2)
    assert local(tensor) is tensor


class Layered(Plain):
    """Blocks of linear layers, of which some have sizes that are no multiples of 16."""

    def build_model(self) -> nn.Module:
        sizes = ((16, 32), (32, 10), (10, 32))
        return nn.Sequential(nn.Sequential(*(nn.Linear(*one) for one in sizes)), nn.Linear(32, 16))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("0")]


def test_layers_of_blocks_that_can_multiply_in_8_bits_do() -> None:
    task = Layered()
    model = task.build_model()
    assert float8_layers(task, model) == [model.get_submodule("0.0")]
    with pytest.raises(ConfigError):
        float8_layers(Plain(), model)


@pytest.mark.parametrize(("name", "suited"), [("1", True), ("0.1", False), ("0", False)])
def test_a_task_chooses_layers(name: str, suited: bool) -> None:
    class Choosing(Layered):
        def float8_layers(self, model: nn.Module) -> list[nn.Module]:
            return [model.get_submodule(name)]

    task = Choosing()
    model = task.build_model()
    if suited:
        assert float8_layers(task, model) == [model.get_submodule("1")]
        return
    with pytest.raises(TaskError):
        float8_layers(task, model)
