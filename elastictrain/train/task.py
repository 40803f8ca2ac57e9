"""What a recipe trains: the seam between the trainer and a user's model.

A task is any class with the methods of `Task`; it inherits from nothing. Its constructor's annotated keyword parameters are
the schema of the config keys `task.*`; a parameter named `model` takes the group `model.*` (annotate it with a frozen
dataclass, and its fields are checked like any other key). Further abilities are separate protocols: a task has one by
defining its methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from elastictrain.data.dataset import Batch, Dataset, Sample
from elastictrain.errors import Problem


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The sum of the losses of one micro-batch, and the weight (token or sample count) it is to be divided by.

    `loss_sum` [] float32, carries the graph. `weight` [] float32, no gradient. The trainer divides by the weight of the whole
    global batch, so a task must not average.
    """

    loss_sum: Tensor
    weight: Tensor


class Task(Protocol):
    """A model and its loss."""

    def build_model(self) -> nn.Module:
        """The model. Called with the seed set, so default initialisation is the same on every rank; under the meta device
        if the task also has `init_parameter`. Called once more before that, under the meta device, to learn its size."""

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Forward one micro-batch. Call `model(...)` itself and exactly once: DDP and FSDP act in its call."""


@runtime_checkable
class HasNeutralOptions(Protocol):
    """Some keys of the task change how the answer is computed, but not the answer: a resumed run may change them."""

    neutral_options: ClassVar[frozenset[str]]
    """Names of constructor parameters."""


@runtime_checkable
class InitializesParameters(Protocol):
    """The model is built on the meta device and filled one tensor at a time: no rank ever holds all of a large model."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill the full, unsharded `tensor` in place; `generator` is on its device and seeded from (run.seed, name)."""

    def init_buffer(self, name: str, tensor: Tensor) -> None:
        """Fill the buffer `tensor` in place."""


@runtime_checkable
class HasBlocks(Protocol):
    """The model has repeated blocks: the units of sharding, compilation and activation checkpointing."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks in the order in which the forward pass reaches them."""


@runtime_checkable
class BringsDatasets(Protocol):
    """The task has its own map-style data instead of token files."""

    def train_dataset(self) -> Dataset:
        """The training samples."""

    def eval_dataset(self) -> Dataset | None:
        """The held-out samples, or None."""


@runtime_checkable
class Collates(Protocol):
    """The task joins samples itself, where they cannot be stacked."""

    def collate(self, samples: list[Sample]) -> Batch:
        """The micro-batch of these samples, in their order: any nest of tensors. Data workers call it, too (`data.workers`):
        there, on a copy of the task that pickle makes; of a static method, nothing else is sent."""


@runtime_checkable
class ChecksTokens(Protocol):
    """The task checks token files itself, before any process group exists."""

    def check_tokens(self, *, seq_len: int, vocab_size: int) -> Sequence[Problem]:
        """What is wrong with samples of `seq_len` + 1 token ids below `vocab_size`; empty if nothing is."""


@runtime_checkable
class CountsFlops(Protocol):
    """The task counts its arithmetic, so that utilisation (MFU) can be shown."""

    def flops_per_sample(self, model: nn.Module, sample: Batch) -> float:
        """Floating-point operations of forward and backward for one sample, without recomputation.

        `sample` has no batch dimension. Source: PaLM, appendix B."""

    def tokens_per_sample(self, sample: Batch) -> int:
        """Tokens in one sample, for tokens/s."""


@runtime_checkable
class ShowsSample(Protocol):
    """The task can show what the model has learnt."""

    def show_sample(self, model: nn.Module, *, device: torch.device, seed: int) -> str:
        """A short text for the terminal at the end of the run. Collective: every rank calls it (a sharded model's forward
        is a collective); deterministic, so that all ranks make the same calls."""


PROTOCOLS = (
    Task,
    InitializesParameters,
    HasBlocks,
    BringsDatasets,
    Collates,
    ChecksTokens,
    CountsFlops,
    ShowsSample,
)
"""The protocols whose methods a task may have."""
