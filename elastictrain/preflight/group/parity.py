"""Whether DDP and FSDP compute what one process alone computes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastictrain.distributed.mesh import MeshShape, make_mesh

_WIDTH, _HIDDEN, _OUT = 24, 50, 3
_BATCH = 4
"""Samples of a rank."""


def measure_parity(
    *, rank: int, world_size: int, device: torch.device, seed: int, at: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Largest difference to the single-process result, relative to its largest element: outputs and gradients, by wrapping.

    In float64, which no setting for faster products touches. Collective: yes.
    """
    # A generator of its own: the run's random numbers stay what they are.
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(world_size * _BATCH, _WIDTH, generator=generator, dtype=torch.float64).to(device)
    alone = _model(generator, device)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    right_output = _step(alone, batch)
    right = {name: _gradient(parameter) for name, parameter in alone.named_parameters()}
    own = slice(rank * _BATCH, (rank + 1) * _BATCH)
    found = {}
    for name, wrap in (("DDP", _ddp), ("FSDP", _fsdp)):
        at(name)
        bare = _model(None, device)
        bare.load_state_dict(state)
        module = wrap(bare, world_size, device)
        output = _step(module, batch[own])
        gradients = {part: _gradient(parameter) for part, parameter in bare.named_parameters()}
        found[name] = max(_difference(output, right_output[own]), _differences(gradients, right))
        del module, bare
    return found


def _model(generator: torch.Generator | None, device: torch.device) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(_WIDTH, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _OUT)).to(torch.float64)
    model.to_empty(device=device)
    if generator is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
    return model


def _ddp(model: nn.Module, world_size: int, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def _fsdp(model: nn.Module, world_size: int, device: torch.device) -> nn.Module:
    # Takes a good part of a second to import, and a quick preflight does without.
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(MeshShape(1, world_size), device_type=device.type)
    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(module: nn.Module, batch: Tensor) -> Tensor:
    """Forward and backward; the loss is a mean over the batch, so that ranks' gradients average to that of the whole."""
    output: Tensor = module(batch)
    loss: Tensor = output.square().sum(1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return output.detach()


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.full_like(parameter, float("nan"))
    whole = getattr(gradient, "full_tensor", None)
    return (gradient if whole is None else whole()).detach().clone()


def _differences(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    return max(_difference(found[name], right[name]) for name in right)


def _difference(found: Tensor, right: Tensor) -> float:
    error = float((found - right).abs().max() / right.abs().max())
    return error if error == error else float("inf")  # noqa: PLR0124  # not a number
