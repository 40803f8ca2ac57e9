import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastictrain.train.task import ChecksTokens, CountsFlops, HasBlocks, InitializesParameters, ShowsSample
from recipes.llama.config import LlamaConfig
from recipes.llama.sample import continue_tokens, windowed_logits
from recipes.llama.task import LlamaTask

CONFIG = LlamaConfig(vocab_size=300, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=16)


def fill(task: LlamaTask, model: nn.Module, names: list[str]) -> None:
    for name in names:
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**32
        task.init_parameter(name, model.get_parameter(name), torch.Generator().manual_seed(seed))


def filled(task: LlamaTask, *, reverse: bool = False) -> nn.Module:
    model = task.build_model()
    names = [name for name, _ in model.named_parameters()]
    fill(task, model, names[::-1] if reverse else names)
    return model


def test_it_has_every_ability_that_the_trainer_asks_for() -> None:
    task = LlamaTask(model=CONFIG)
    for ability in (ChecksTokens, InitializesParameters, HasBlocks, CountsFlops, ShowsSample):
        assert isinstance(task, ability)


def test_initial_values_depend_on_the_generator_alone() -> None:
    task = LlamaTask(model=CONFIG)
    forward, backward = filled(task), filled(task, reverse=True)
    for (name, left), (_, right) in zip(forward.named_parameters(), backward.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def test_initial_values_have_their_spread() -> None:
    config = dataclasses.replace(CONFIG, dim=128, num_layers=8)
    model = filled(LlamaTask(model=config))
    stds = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2}
    for name, std in stds.items():
        expected = 0.005 if name.endswith((".o.weight", ".down.weight")) else 0.02
        assert std == pytest.approx(expected, rel=0.05), name
    assert all((parameter == 1).all() for parameter in model.parameters() if parameter.ndim == 1)


def test_loss_is_summed_over_every_predicted_token() -> None:
    task = LlamaTask(model=CONFIG)
    tokens = torch.randint(0, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    model = filled(task)
    output = task.loss(model, {"tokens": tokens})
    logits = model(tokens[:, :-1])
    expected = -torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).sum()
    assert output.weight.item() == 30
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-6, atol=0.0)
    assert output.loss_sum.item() / 30 == pytest.approx(5.7, abs=0.1), "ln(300) before any training"


def test_tokens_that_do_not_fit_the_tables_are_refused() -> None:
    task = LlamaTask(model=CONFIG)
    assert task.check_tokens(seq_len=16, vocab_size=300) == []
    problems = {problem.key: problem.message for problem in task.check_tokens(seq_len=17, vocab_size=301)}
    assert [figure in problems["train.seq_len"] for figure in ("16", "17")] == [True] * 2
    assert "301" in problems["model.vocab_size"]


def test_arithmetic_and_tokens_of_a_sample() -> None:
    task = LlamaTask(model=CONFIG)
    sample = {"tokens": torch.zeros(17, dtype=torch.int64)}
    assert task.tokens_per_sample(sample) == 16
    # Per layer 32*32 (q), 2 * 16*32 (k, v), 32*32 (o), 3 * 48*32 (SwiGLU); the head 300*32.
    products = 2 * (1024 + 1024 + 1024 + 4608) + 9600
    attention = 12 * 2 * 32 * 16
    assert task.flops_per_sample(task.build_model(), sample) == 16 * (6 * products + attention)


def test_blocks_are_the_layers_in_order() -> None:
    task = LlamaTask(model=CONFIG)
    model = task.build_model()
    assert task.blocks(model) == [model.layers[0], model.layers[1]]


def test_sample_is_deterministic_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.llama.task._SHOWN_TOKENS", 20)
    task = LlamaTask(model=CONFIG)
    model = filled(task)
    shapes = []
    model.register_forward_pre_hook(lambda module, arguments: shapes.append(tuple(arguments[0].shape)))
    texts = [task.show_sample(model, device=torch.device("cpu"), seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the model writes:\ndef ")
    assert model.training
    assert shapes == [(1, 16)] * 60, "one shape, and the same number of calls on every rank"


def test_sampling_follows_the_logits_of_the_last_seen_token() -> None:
    class Successor(nn.Module):
        """Is certain that n + 1 follows n; ids from 8 on are even likelier but not offered."""

        def forward(self, tokens: Tensor) -> Tensor:
            logits = torch.full((*tokens.shape, 10), -100.0)
            logits.scatter_(2, ((tokens + 1) % 8)[..., None], 100.0)
            logits[..., 8:] = 1000.0
            return logits

    next_logits = windowed_logits(Successor(), window=4, vocab_size=8, device=torch.device("cpu"))
    assert continue_tokens(next_logits, [5, 6], num_tokens=6, temperature=1.0, seed=0) == [5, 6, 7, 0, 1, 2, 3, 4]


def test_sample_in_the_words_of_a_huggingface_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.llama.task._SHOWN_TOKENS", 20)
    tokenizers = pytest.importorskip("tokenizers")
    words = {"def": 0, "class": 1, "</s>": 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    model.save(str(file))
    task = LlamaTask(model=CONFIG, tokenizer=str(file), prompt="class def")
    text = task.show_sample(filled(task), device=torch.device("cpu"), seed=0)
    assert text.startswith("the model writes:\nclass def ")
    assert set(text.partition("\n")[2].split()) == set(words)
