"""What a recipe trains: the seam between the trainer and a user's model.

A task is any class with the methods of `Task`; it inherits from nothing. Its constructor's annotated keyword parameters are
the schema of the config keys `task.*`; a parameter named `model` takes the group `model.*` (annotate it with a frozen
dataclass, and its fields are checked like any other key). Further abilities are separate protocols: a task has one by
defining its methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from elastictrain.data.dataset import Batch, Dataset, Sample
from elastictrain.errors import Problem
from elastictrain.events import Step


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The sum of the losses of one micro-batch, and the weight (token or sample count) it is to be divided by.

    `loss_sum` [] float32, carries the graph. `weight` [] float32, no gradient. The trainer divides by the weight of the whole
    global batch, so a task must not average.

    `metrics`: further sums of the micro-batch by name, [] and without gradient, such as how many answers are right. Each is
    divided by `weight`, or in a pair (sum, weight of its own) by that. Every micro-batch has the same names.
    """

    loss_sum: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor | tuple[Tensor, Tensor]] = field(default_factory=dict)


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
class ChoosesFloat8Layers(Protocol):
    """The task says which layers multiply in 8 bits with `train.precision=fp8`; without it, all linear layers of `blocks` do
    whose sizes are multiples of 16."""

    def float8_layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules of the class torch.nn.Linear; torchao's take their place before the model is sharded. Collective: no."""


@runtime_checkable
class GroupsParameters(Protocol):
    """Some parameters have options of their own in the optimizer."""

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Groups as torch's optimizers take them: `params`, and perhaps `lr` (which the schedule scales), `weight_decay` and so
        on. Each parameter of `model` with requires_grad is in exactly one; it may be sharded (a DTensor). Collective: no."""


@runtime_checkable
class UpdatesInTurn(Protocol):
    """A step has several updates, in turn and of the same samples, each with a loss and parameters of its own: a GAN's."""

    updates: ClassVar[Sequence[str]]
    """Their names in order. Each group of `parameter_groups` says in `update` which one changes its parameters."""

    def update_loss(self, update: str, model: nn.Module, batch: Batch) -> LossOutput:
        """The loss of one update, under the rules of `Task.loss`, which is for evaluations only then. The model has the updates
        before it. Gradients of parameters of other updates are dropped."""


@runtime_checkable
class NamesInitialWeights(Protocol):
    """Names in `train.init_from` are not those of the model."""

    def initial_name(self, name: str, stored: frozenset[str]) -> str | None:
        """Which of the `stored` tensors has the first value of the parameter or buffer `name`; None if it keeps its own."""


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
class FollowsSteps(Protocol):
    """Hook. All hooks are called on every rank, in the same order and with the same figures, so that they may communicate; they
    must not change the model. What a hook raises ends the run."""

    def on_step(self, step: Step) -> None:
        """Called when the figures of a step are known: the next one may have begun. Steps after a restored one come again."""


@runtime_checkable
class FollowsEvaluations(Protocol):
    """Hook, as `FollowsSteps`."""

    def on_eval(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation."""


@runtime_checkable
class FollowsRestarts(Protocol):
    """Hook, as `FollowsSteps`."""

    def on_restart(self, step: int) -> None:
        """Called at each start and recovery, before the first step; the state is that after `step`, 0 at the beginning. Under
        the launcher the task may be one that has seen later steps."""


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
    ChoosesFloat8Layers,
    BringsDatasets,
    Collates,
    ChecksTokens,
    CountsFlops,
    ShowsSample,
    GroupsParameters,
    UpdatesInTurn,
    NamesInitialWeights,
    FollowsSteps,
    FollowsEvaluations,
    FollowsRestarts,
)
"""The protocols whose methods a task may have."""
