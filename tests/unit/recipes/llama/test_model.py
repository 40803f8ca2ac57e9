import dataclasses

import pytest
import torch
import torch.nn.functional as F

from recipes.llama.config import LlamaConfig
from recipes.llama.loss import LossOptions
from recipes.llama.model import Llama, RMSNorm
from recipes.llama.task import LlamaTask

CONFIG = LlamaConfig(
    vocab_size=40, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=32, rope_scaling_factor=8.0
)
TOKENS = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(0))


def build(config: LlamaConfig = CONFIG, *, chunk_tokens: int = 8) -> Llama:
    torch.manual_seed(1)
    return Llama(config, LossOptions(chunk_tokens))


def test_a_token_sees_only_what_stands_before_it() -> None:
    model = build()
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 40
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert ((before - after).abs().amax(dim=-1)[:, 9:] > 1e-4).all()


def test_shared_key_heads_equal_repeated_ones() -> None:
    grouped = build()
    full = build(dataclasses.replace(CONFIG, num_kv_heads=4))
    state = grouped.state_dict()
    for name in state:
        if ".attention.k." in name or ".attention.v." in name:
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(TOKENS), full(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_loss_in_the_forward_pass_equals_the_loss_of_the_logits(tied: bool) -> None:
    model = build(dataclasses.replace(CONFIG, tie_embeddings=tied))
    targets = TOKENS.roll(-1, dims=1)
    plain = F.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss = model(TOKENS, targets)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0.0)
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_autocast_keeps_the_stream_in_bf16_and_gradients_in_float32() -> None:
    model = build()
    targets = TOKENS.roll(-1, dims=1)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(TOKENS, targets)
        assert model(TOKENS).dtype == torch.bfloat16
    loss.backward()
    assert seen == [torch.bfloat16] * 2
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    torch.testing.assert_close(loss, model(TOKENS, targets), rtol=2e-2, atol=0.0)


def test_norm_computes_in_float32() -> None:
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    x = (100 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-8, atol=0.0)


def test_only_parameters_are_in_the_state() -> None:
    assert set(build().state_dict()) == {name for name, _ in build().named_parameters()}
    assert [name.rpartition(".")[2] for name, _ in build().named_buffers()] == ["cos", "sin"]


def test_built_on_the_meta_device_and_filled_it_equals_one_built_directly() -> None:
    task = LlamaTask(model=CONFIG)
    with torch.device("meta"):
        model = task.build_model()
    model.to_empty(device="cpu")
    direct = build()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(direct.get_parameter(name))
    for name, buffer in model.named_buffers():
        task.init_buffer(name, buffer.fill_(float("nan")))
    assert torch.equal(model(TOKENS), direct(TOKENS))
