import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.llama.loss import LossOptions, cross_entropy_sum

TOKENS, DIM, VOCAB = 50, 24, 97


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden.float() @ weight.float().t(), targets, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 16, 25, 50, 4096])
def test_loss_and_gradients_equal_the_plain_ones(chunk_tokens: int) -> None:
    hidden, weight, targets = problem()
    loss = cross_entropy_sum(hidden, weight, targets, options=LossOptions(chunk_tokens))
    got = (loss, *torch.autograd.grad(loss * 0.25, (hidden, weight)))
    expected_loss = plain(hidden, weight, targets)
    expected = (expected_loss, *torch.autograd.grad(expected_loss * 0.25, (hidden, weight)))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, targets = problem()
    with torch.no_grad():
        loss = cross_entropy_sum(hidden, weight, targets, options=LossOptions(16))
    torch.testing.assert_close(loss, plain(hidden, weight, targets), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("chunk_tokens", [10, 50])
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_hidden_state_with_float32_weight(chunk_tokens: int, autocast: bool) -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = cross_entropy_sum(hidden, weight, targets, options=LossOptions(chunk_tokens))
    hidden_gradient, weight_gradient = torch.autograd.grad(loss, (hidden, weight))
    expected = plain(hidden, weight, targets)
    expected_hidden, expected_weight = torch.autograd.grad(expected, (hidden, weight))
    assert (loss.dtype, hidden_gradient.dtype, weight_gradient.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0.0)
    assert (hidden_gradient.float() - expected_hidden.float()).norm() < 0.01 * expected_hidden.float().norm()
    assert (weight_gradient - expected_weight).norm() < 0.01 * expected_weight.norm()


class LargestResult(TorchDispatchMode):
    """Remembers the most elements that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (result if isinstance(result, tuple) else (result,)) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("gradients", [True, False])
def test_logits_of_all_tokens_never_exist(gradients: bool) -> None:
    hidden, weight, targets = (tensor.repeat(40, *[1] * (tensor.dim() - 1)).detach() for tensor in problem())
    hidden.requires_grad_(gradients)
    with LargestResult() as largest:
        loss = cross_entropy_sum(hidden, weight, targets, options=LossOptions(10))
        if gradients:
            loss.backward()
    assert largest.elements == max(10 * len(weight), hidden.numel(), weight.numel())
