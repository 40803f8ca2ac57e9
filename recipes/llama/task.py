"""The task `llama`: next-token prediction on token files."""

import math
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor, nn

from elastictrain.checkpoint.commands.export import StoredModel
from elastictrain.config.constraints import NonEmpty, Range
from elastictrain.data.dataset import Batch
from elastictrain.data.tokenizer import ByteTokenizer, Tokenizer, load_huggingface
from elastictrain.errors import ConfigError, Problem
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.train.task import LossOutput

from .config import LlamaConfig
from .huggingface import parameter_shapes
from .loss import LossOptions
from .model import Llama
from .rope import rope_tables
from .sample import continue_tokens, windowed_logits
from .weights import HuggingFaceWeights, export_weights

_INIT_STD = 0.02
_SHOWN_TOKENS = 120
_SHOWN_WINDOW = 128
_SHOWN_TEMPERATURE = 0.6


class LlamaTask:
    """A Llama 3 that learns to predict the next token."""

    neutral_options = frozenset({"loss_chunk_tokens", "compile_loss", "tokenizer", "prompt"})

    def __init__(
        self,
        *,
        model: LlamaConfig,
        init_from: Annotated[str, NonEmpty()] | None = None,
        loss_chunk_tokens: Annotated[int, Range(1)] = 4096,
        compile_loss: bool = False,
        tokenizer: Annotated[str, NonEmpty()] | None = None,
        prompt: Annotated[str, NonEmpty()] = "def ",
    ) -> None:
        """See README.md beside this file for the meaning of each key."""
        self._config = model
        self._init_from = init_from
        self._loss = LossOptions(loss_chunk_tokens, compiled=compile_loss)
        self._tokenizer_file = tokenizer
        self._prompt = prompt

    def build_model(self) -> Llama:
        """See `elastictrain.train.task.Task`."""
        return Llama(self._config, self._loss)

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """`tokens` [B, T + 1] int64: T tokens in, each predicting the one behind it, if that is of the same of `documents`."""
        tokens = batch["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if (documents := batch.get("documents")) is not None:
            counted = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
            loss_sum = model(inputs, targets.masked_fill(~counted, -1), documents[:, :-1])
            return LossOutput(loss_sum, counted.sum().float())
        loss_sum = model(inputs, targets)
        return LossOutput(loss_sum, torch.full((), targets.numel(), dtype=torch.float32, device=tokens.device))

    def check_tokens(self, *, seq_len: int, vocab_size: int) -> list[Problem]:
        """Samples must fit the rotary tables, and token ids the embedding."""
        config = self._config
        problems = []
        if self._tokenizer_file is not None:
            known = self._tokenizer().description.vocab_size
            if known > config.vocab_size:
                message = f"must have at most model.vocab_size = {config.vocab_size} tokens, but has {known}"
                problems.append(Problem("task.tokenizer", message))
        if seq_len > config.max_seq_len:
            problems.append(Problem("train.seq_len", f"must be <= model.max_seq_len = {config.max_seq_len}, but is {seq_len}"))
        if vocab_size > config.vocab_size:
            message = f"must be >= {vocab_size}, the vocabulary of the tokens in data.path, but is {config.vocab_size}"
            problems.append(Problem("model.vocab_size", message))
        return problems

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """From `init_from` if there is one; else norms are 1 and matrices normal with standard deviation 0.02, divided by
        sqrt(2 * layers) where they write to the residual stream, so that its size does not grow with depth."""
        with torch.no_grad():
            if self._weights is not None:
                tensor.copy_(self._weights.read(name))
            elif tensor.ndim == 1:
                tensor.fill_(1.0)
            else:
                writes_to_stream = name.endswith((".o.weight", ".down.weight"))
                std = _INIT_STD / math.sqrt(2 * self._config.num_layers) if writes_to_stream else _INIT_STD
                tensor.normal_(0.0, std, generator=generator)

    def init_buffer(self, name: str, tensor: Tensor) -> None:
        """The rotary tables, computed on the CPU so that every device has the same bits."""
        cos, sin = rope_tables(self._config, device=torch.device("cpu"))
        tensor.copy_({"cos": cos, "sin": sin}[name.rpartition(".")[2]])

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer layers."""
        return list(model.get_submodule("layers").children())

    def flops_per_sample(self, model: nn.Module, sample: Batch) -> float:
        """6 N + 12 L dim T for each of T tokens, N = parameters in matrix products (the head counted, the embedding not).

        Attention is counted in full, not halved for causality. Source: PaLM, appendix B; TorchTitan's MFU counts the same.
        """
        config = self._config
        kv_dim = config.num_kv_heads * config.head_dim
        in_layer = 2 * config.dim * (config.dim + kv_dim) + 3 * config.dim * config.ffn_dim
        multiplied = config.num_layers * in_layer + config.vocab_size * config.dim
        num_tokens = self.tokens_per_sample(sample)
        return num_tokens * (6.0 * multiplied + 12.0 * config.num_layers * config.dim * num_tokens)

    def tokens_per_sample(self, sample: Batch) -> int:
        """Tokens that go in and are predicted; the sample has one more."""
        return sample["tokens"].shape[-1] - 1

    def show_sample(self, model: nn.Module, *, device: torch.device, seed: int) -> str:
        """The prompt and what the model writes behind it."""
        tokenizer = self._tokenizer()
        prompt = [int(token) for token in tokenizer.encode([self._prompt.encode()])[0]]
        training = model.training
        model.eval()
        # Compiling again for one more shape would take longer than the sample itself.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            tokens = continue_tokens(
                windowed_logits(
                    model,
                    window=min(_SHOWN_WINDOW, self._config.max_seq_len),
                    vocab_size=tokenizer.description.vocab_size,
                    device=device,
                ),
                prompt,
                num_tokens=_SHOWN_TOKENS,
                temperature=_SHOWN_TEMPERATURE,
                seed=seed,
            )
        model.train(training)
        return f"the model writes:\n{tokenizer.decode(tokens)}"

    def export_huggingface(self, model: StoredModel, *, store: Store, dtype: torch.dtype) -> None:
        """See `elastictrain.checkpoint.commands.export.ExportsHuggingFace`."""
        for name, shape in parameter_shapes(self._config).items():
            stored = model.shapes.get(name)
            if stored != shape:
                found = "is not in it" if stored is None else f"has the shape {list(stored)} in it"
                raise ConfigError(
                    f"{model.url} must hold the model of config.yaml, whose {name} has the shape {list(shape)}, "
                    f"but {name} {found}"
                )
        export_weights(model.read, config=self._config, store=store, dtype=dtype)

    def _tokenizer(self) -> Tokenizer:
        if self._tokenizer_file is None:
            return ByteTokenizer()
        return load_huggingface(self._tokenizer_file)

    @cached_property
    def _weights(self) -> HuggingFaceWeights | None:
        if self._init_from is None:
            return None
        return HuggingFaceWeights(open_store(self._init_from), config=self._config)
