import dataclasses

import pytest
import torch
import torch.nn.functional as F

from recipes.llama.config import LlamaConfig
from recipes.llama.loss import LossOptions
from recipes.llama.model import Llama, RMSNorm
from recipes.llama.packed import Packed
from recipes.llama.rope import Rotary
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


def packed_sample(lengths: list[int], *, length: int) -> dict[str, torch.Tensor]:
    """One row with documents of these lengths, and padding."""
    tokens = torch.randint(0, 40, (1, length), generator=torch.Generator().manual_seed(3))
    ids = [number for number, size in enumerate(lengths) for _ in range(size)]
    return {"tokens": tokens, "documents": torch.tensor([ids + [-1] * (length - len(ids))])}


@pytest.mark.parametrize("lengths", [[17], [9, 8], [5, 1, 4, 2], [2, 2]])
def test_packed_documents_are_computed_as_if_each_were_alone(lengths: list[int]) -> None:
    model, task = build(), LlamaTask(model=CONFIG)
    first, second = packed_sample(lengths, length=17), packed_sample([3, 14], length=17)
    batch = {name: torch.cat((first[name], second[name])) for name in first}
    together = task.loss(model, batch)
    gradients = torch.autograd.grad(together.loss_sum, list(model.parameters()))
    total, weight = torch.zeros(()), 0.0
    for row, sizes in enumerate((lengths, [3, 14])):
        for tokens in batch["tokens"][row, : sum(sizes)].split(sizes):
            if len(tokens) > 1:
                alone = task.loss(model, {"tokens": tokens[None]})
                total, weight = total + alone.loss_sum, weight + float(alone.weight)
    torch.testing.assert_close(together.loss_sum, total, rtol=1e-6, atol=1e-5)
    assert float(together.weight) == weight
    for ours, theirs in zip(gradients, torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_sample_of_one_document_is_computed_as_without_packing() -> None:
    model, task = build(), LlamaTask(model=CONFIG)
    sample = packed_sample([17], length=17)
    packed, plain = task.loss(model, sample), task.loss(model, {"tokens": sample["tokens"]})
    torch.testing.assert_close(packed.loss_sum, plain.loss_sum, rtol=1e-6, atol=0.0)
    assert float(packed.weight) == float(plain.weight) == 16


def test_a_token_sees_nothing_of_another_document() -> None:
    model = build()
    documents = torch.tensor([[0] * 6 + [1] * 11])
    changed = TOKENS[:1].clone()
    changed[:, 2] = (changed[:, 2] + 1) % 40
    before, after = model(TOKENS[:1], documents=documents), model(changed, documents=documents)
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, 2:6], after[:, 2:6])


def test_positions_begin_anew_in_each_document() -> None:
    # Attention depends on differences of positions only, so no loss would show it.
    packed = Packed.of(torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 2, 2, 2, 2, 2]]))
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]
    rotary, x = Rotary(CONFIG), torch.randn(2, 7, 3, CONFIG.head_dim, generator=torch.Generator().manual_seed(0))
    turned = rotary(x, packed.positions)
    torch.testing.assert_close(turned[0, 3:5], rotary(x[:1, 3:5])[0], rtol=0, atol=0)
