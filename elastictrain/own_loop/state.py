"""The state of a loop that a user has written: models, optimizers, and what else must survive."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elastictrain.bounded_json import encode_record, parse_json
from elastictrain.checkpoint.manifest import PER_RANK, JsonValue, StateCounters
from elastictrain.distributed.wrapping import MeshShape
from elastictrain.errors import ConfigError, Problem
from elastictrain.own_loop.nest import UnknownValueError, put_together, take_apart
from elastictrain.own_loop.per_rank import HasStateDict, PerRank
from elastictrain.train.parameters import saved_tensors
from elastictrain.train.state import JsonState

JSON = "own.json"
"""The tensor [65536] uint8 that holds all state that is no tensor, as JSON with spaces after it."""

_JSON_BYTES = 1 << 16
_OF_MACHINES = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))  # how, not what, an optimizer computes


T = TypeVar("T")


@dataclass(slots=True)
class OwnState:
    """Models, optimizers and extras by name, which is part of the names of tensors in a checkpoint. Made by `own_state`."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    extra: Mapping[str, object]
    counters: StateCounters = field(default_factory=lambda: StateCounters(0))
    step: int = 0
    _names: dict[int, str] = field(default_factory=dict, init=False)  # of parameters, by identity
    _given: dict[str, Tensor] = field(default_factory=dict, init=False)  # what `tensors` has returned last
    _made_up: set[int] = field(default_factory=set, init=False)  # parameters whose optimizer has not updated them yet
    _shapes: dict[str, torch.Size] | None = field(default=None, init=False)  # by name, once snapshots have places for them
    _mesh: DeviceMesh | None = field(default=None, init=False)  # of all ranks, where each of them has an extra for itself

    def __post_init__(self) -> None:
        for name, parameter in self._parameters():
            self._names[id(parameter)] = name
        for key, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in self._names:
                        message = (
                            f"has a parameter of shape {list(parameter.shape)} in group {index} that no module of `model` has"
                        )
                        raise _problem(f"optimizer{key}", message)

    def modules(self) -> list[nn.Module]:
        """Models with their wrappers, and extras that are modules."""
        return [*self.models.values(), *(value for value in self.extra.values() if isinstance(value, nn.Module))]

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors by their name; the state of an optimizer is there after its first step, or after `make_room`."""
        named, document = self._parts()
        text = encode_record(document)
        if len(text) > _JSON_BYTES:
            message = f"must have at most {_JSON_BYTES} bytes of numbers and text, with all options of optimizers, but has"
            raise _problem("extra", f"{message} {len(text)}")
        named[JSON] = torch.frombuffer(bytearray(text.ljust(_JSON_BYTES)), dtype=torch.uint8)
        self._given = named
        shapes = {name: tensor.shape for name, tensor in named.items()}
        if self._shapes is not None and shapes != self._shapes:
            changed = sorted(name for name, _ in shapes.items() ^ self._shapes.items())
            message = (
                f"must have the same tensors from the first step on, but these came, went or changed: {', '.join(changed[:4])}"
            )
            raise _problem("the state of the run", message)
        return named

    def fix_shapes(self) -> None:
        """From now on the same tensors are there: snapshots have a place for each."""
        self._shapes = {name: tensor.shape for name, tensor in self.tensors().items()}

    def changed_by_forward(self) -> frozenset[str]:
        """What the user's code may change at any time: all but parameters that an optimizer updates, or nothing does, and what
        optimizers keep on their devices."""
        on_device = any(parameter.device.type != "cpu" for _, parameter in self._parameters())
        updated = {id(parameter) for optimizer in self.optimizers.values() for parameter in _trained(optimizer)}
        fixed = {name for name, one in self._parameters() if not one.requires_grad or id(one) in updated}
        fixed |= {name for name, _, _ in self._optimizer_values()}
        return frozenset(
            name for name, tensor in self.tensors().items() if name not in fixed or (on_device and tensor.device.type == "cpu")
        )

    def join(self, group: dist.ProcessGroup) -> None:
        """Called in each generation, with all its ranks (on CPUs). Collective: no."""
        if any(isinstance(value, PerRank) for value in self.extra.values()):
            self._mesh = DeviceMesh.from_group(group, "cpu")

    def mesh_shape(self, world_size: int) -> MeshShape:
        sharded = any(isinstance(one, DTensor) for name, one in self.tensors().items() if not name.endswith(PER_RANK))
        return MeshShape(1, world_size) if sharded else MeshShape(world_size, 1)

    def scalars(self, step: int, *, global_batch: int) -> JsonState:
        return asdict(replace(self.counters, step=step, positions=step * global_batch))

    def adopt(self, counters: StateCounters) -> None:
        """The tensors that `tensors` has returned last have the values of a checkpoint: the rest gets its values, too."""
        self._load(self._given)
        self.step, self.counters = counters.step, replace(counters, data_digest=self.counters.data_digest)

    def make_room(self) -> None:
        """Have optimizers make the state of all their parameters, where it is missing, by an update of zeros at rate zero. Once
        a parameter has a gradient, what was made up is dropped again (`before_update`)."""
        for key, optimizer in self.optimizers.items():
            lacking = [one for one in _trained(optimizer) if not optimizer.state.get(one)]
            if not lacking:
                continue
            self._made_up |= {id(one) for one in lacking}
            gradients = [(one, one.grad) for one in _trained(optimizer)]
            rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
            for one in _trained(optimizer):
                one.grad = None
            for one in lacking:
                one.grad = torch.zeros_like(one)
            try:
                for group in optimizer.param_groups:
                    if "lr" in group:
                        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
                # Not the method of the object: a scheduler counts its calls, and hooks are not meant for this one.
                update: Any = type(optimizer).step
                (update.__wrapped__ if getattr(update, "hooked", False) else update)(optimizer)
            except Exception as error:
                message = (
                    f"({type(optimizer).__name__}) must make its state in `step()` without arguments, but raised {error!r}"
                )
                raise _problem(f"optimizer{key}", message) from error
            finally:
                for group, rate in zip([one for one in optimizer.param_groups if "lr" in one], rates, strict=True):
                    group["lr"] = rate
                for one, gradient in gradients:
                    one.grad = gradient

    def forget(self) -> None:
        """Nothing was restored: the optimizers are as their user has made them."""
        for optimizer in self.optimizers.values():
            self._drop(optimizer, _trained(optimizer))

    def before_update(self, optimizer: Optimizer) -> None:
        """Called when an optimizer is about to update its parameters."""
        if self._made_up:
            self._drop(optimizer, [one for one in _trained(optimizer) if one.grad is not None])

    def _drop(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        for one in parameters:
            if id(one) in self._made_up:
                optimizer.state.pop(one, None)
                self._made_up.discard(id(one))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        document = parse_json(bytes(tensors[JSON].cpu().numpy().tobytes()))
        made_up = set(document["made_up"])
        self._made_up = {number for number, name in self._names.items() if name in made_up}
        for key, optimizer in self.optimizers.items():
            saved = put_together(document["optimizers"][key], tensors)
            groups = saved["groups"]
            if len(groups) != len(optimizer.param_groups):
                count = len(optimizer.param_groups)
                raise _problem(f"optimizer{key}", f"must have {len(groups)} groups, as in the checkpoint, but has {count}")
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            for name, values in saved["state"].items():
                parameter = next(one for one in _trained(optimizer) if self._names[id(one)] == name)
                optimizer.state[parameter].update(values)
        for key, value in self.extra.items():
            if isinstance(value, PerRank):
                value.load(tensors[f"extra.{key}{PER_RANK}"])
            elif not isinstance(value, nn.Module | Tensor) and isinstance(value, HasStateDict):
                if key not in document["extra"]:
                    raise _problem(
                        f"extra.{key}", "was no part of the run when it was saved: leave it out, or begin another run"
                    )
                try:
                    value.load_state_dict(put_together(document["extra"][key], tensors))
                except KeyError as error:
                    message = f"must have all its tensors before run.restore(), in their shapes, but lacks {error}"
                    raise _problem(f"extra.{key}", message) from error

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, JsonValue]]:
        named: dict[str, Tensor] = {}
        for key, model in self.models.items():
            named |= {f"model{key}.{name}": tensor for name, tensor in saved_tensors(plain(model)).items()}
        optimizers: dict[str, JsonValue] = {}
        for key, optimizer in self.optimizers.items():
            groups: list[JsonValue] = []
            for index, group in enumerate(optimizer.param_groups):
                options = {name: value for name, value in group.items() if name not in _OF_MACHINES}
                groups.append(_apart(options, f"optim{key}.groups.{index}", named, key=f"optimizer{key}"))
            optimizers[key] = {"groups": groups, "state": {}}
        for name, tensor, _ in self._optimizer_values():
            named[name] = tensor
        for key, values in self._other_values().items():
            document = optimizers[key]
            assert isinstance(document, dict)  # noqa: S101
            document["state"] = values
        extra: dict[str, JsonValue] = {}
        for key, value in self.extra.items():
            if isinstance(value, nn.Module):
                named |= {f"extra.{key}.{name}": tensor for name, tensor in saved_tensors(plain(value)).items()}
            elif isinstance(value, Tensor):
                named[f"extra.{key}"] = value
            elif isinstance(value, PerRank):
                named[f"extra.{key}{PER_RANK}"] = value.tensor(f"extra.{key}", self._mesh)
            else:
                assert isinstance(value, HasStateDict)  # noqa: S101
                extra[key] = _apart(value.state_dict(), f"extra.{key}", named, key=f"extra.{key}")
        made_up = sorted(name for number, name in self._names.items() if number in self._made_up)
        return named, {"optimizers": optimizers, "extra": extra, "made_up": list(made_up)}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for key, model in self.models.items():
            for name, parameter in plain(model).named_parameters():
                yield f"model{key}.{name}", parameter

    def _optimizer_values(self) -> Iterator[tuple[str, Tensor, str]]:
        """Tensors in the state of parameters, with their names."""
        for key, optimizer in self.optimizers.items():
            for parameter in _trained(optimizer):
                for kind, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"optim{key}.{kind}.{self._names[id(parameter)].removeprefix('model.')}", value, key

    def _other_values(self) -> dict[str, dict[str, JsonValue]]:
        """What optimizers keep of a parameter besides tensors, by optimizer and parameter."""
        found: dict[str, dict[str, JsonValue]] = {}
        for key, optimizer in self.optimizers.items():
            values = found[key] = {}
            for parameter in _trained(optimizer):
                state = optimizer.state.get(parameter, {})
                others = {kind: one for kind, one in state.items() if not isinstance(one, Tensor)}
                if others:
                    name = self._names[id(parameter)]
                    values[name] = _apart(others, f"state of {name}", {}, key=f"optimizer{key}")
        return found


def own_state(model: object, optimizer: object, extra: Mapping[str, object] | None) -> OwnState:
    """`model`: a module, or modules by name; `optimizer` likewise, or None. Raises: ConfigError naming the argument."""
    models, optimizers = _by_name(model, nn.Module, "model"), _by_name(optimizer, Optimizer, "optimizer")
    if not models:
        raise _problem("model", "must be a module, or a mapping of names to modules, but is empty")
    if extra is not None and not isinstance(extra, Mapping):
        raise _problem("extra", f"must be a mapping of names to objects, but is a {type(extra).__name__}")
    for key, value in (extra or {}).items():
        if not isinstance(value, nn.Module | Tensor | HasStateDict | PerRank):
            wanted = "must be a module, a tensor, a PerRank, or have `state_dict` and `load_state_dict`"
            message = f"{wanted}, but is a {type(value).__name__}"
            raise _problem(f"extra.{key}", message)
    state = OwnState(models, {name: _inner(one) for name, one in optimizers.items()}, dict(extra or {}))
    for name, tensor in state.tensors().items():
        if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            message = f"of shape {list(tensor.shape)} must have memory for each value, but is expanded: use its .clone()"
            raise _problem(name, message)
    return state


def plain(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile: its parameters have the names that they have without these."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside one that only passes calls on, as Accelerate's: hooks and state are those of the inner one."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _by_name(given: object, kind: type[T], argument: str) -> dict[str, T]:
    """By the part that the name adds to those of tensors: ".NAME", or nothing for a single one."""
    if given is None and argument != "model":
        return {}
    named = {f".{name}": one for name, one in given.items()} if isinstance(given, Mapping) else {"": given}
    for name, one in named.items():
        if not isinstance(one, kind):
            message = f"must be a {kind.__name__}, or a mapping of names to such, but is a {type(one).__name__}"
            raise _problem(f"{argument}{name}", message)
    return cast(dict[str, T], named)


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]


def _apart(value: object, name: str, tensors: dict[str, Tensor], *, key: str) -> JsonValue:
    try:
        return take_apart(value, name, tensors)
    except UnknownValueError as error:
        message = f"must consist of tensors, numbers, texts, lists and mappings, as a checkpoint holds no pickle, but {error}"
        raise _problem(key, message) from error


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message)])
