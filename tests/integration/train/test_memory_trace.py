"""The memory of a step, found without it, against a count by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastictrain.config.load import load
from elastictrain.identity import Identity
from elastictrain.train.dry_run import blank_samples
from elastictrain.train.memory_trace import Peak, Use, trace_step
from elastictrain.train.task import LossOutput

DIM, WIDE, LAYERS, VOCABULARY, LENGTH, BATCH = 64, 256, 3, 512, 128, 4
TOKENS = LENGTH * BATCH
FLOAT = 4


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, WIDE, bias=False)
        self.down = nn.Linear(WIDE, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class WideModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(WideBlock() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class WideTask:
    def build_model(self) -> nn.Module:
        return WideModel()

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return LossOutput(loss.float(), torch.tensor(float(TOKENS)))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("layers").children())


def trace(*, world_size: int = 1, **changes: Any) -> Peak:
    config = load(["recipe=llama_tiny", "train.global_batch=8", f"train.micro_batch={BATCH}", f"train.seq_len={LENGTH}"])
    parallel = replace(config.parallel, kind=changes.pop("kind", "ddp"))
    config = replace(config, parallel=parallel, train=replace(config.train, **changes))
    identity = Identity(0, world_size, 0, world_size, "here", launched=False)
    return trace_step(config, WideTask(), identity, samples=blank_samples(config))


PARAMETERS = FLOAT * (2 * VOCABULARY * DIM + LAYERS * 2 * DIM * WIDE)
STEPS = FLOAT * (2 + 2 * LAYERS)  # AdamW counts for each parameter
EMBEDDED = FLOAT * TOKENS * DIM  # also what each block gets, and returns
INSIDE = FLOAT * TOKENS * WIDE
LOGITS = FLOAT * TOKENS * VOCABULARY


@pytest.mark.parametrize(("world_size", "kind"), [(1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "hsdp")])
def test_the_state_is_counted_exactly(world_size: int, kind: str) -> None:
    shards = 1 if kind == "ddp" else world_size
    peak = trace(world_size=world_size, kind=kind, micro_batch=1)
    assert peak.uses[Use.PARAMETERS] == PARAMETERS // shards
    assert peak.uses[Use.OPTIMIZER] == 2 * PARAMETERS // shards + STEPS


@pytest.mark.parametrize(
    ("checkpointing", "kept"),
    [
        # What goes into each block and the head; the hidden layer after relu, which keeps its result, too.
        ("none", (LAYERS + 1) * EMBEDDED + LAYERS * INSIDE),
        ("full", (LAYERS + 1) * EMBEDDED),
    ],
)
def test_activations_are_what_a_count_by_hand_says(checkpointing: str, kept: int) -> None:
    peak = trace(activation_checkpointing=checkpointing)
    assert peak.phase == "backward"
    # The loss keeps the logarithm of all probabilities, and numbers for each token or fewer.
    assert peak.uses[Use.ACTIVATIONS] == pytest.approx(kept + LOGITS, abs=64 * TOKENS)


def test_compiled_blocks_are_partitioned_as_torch_does_it() -> None:
    eager = trace(activation_checkpointing="none").uses[Use.ACTIVATIONS]
    compiled = trace(activation_checkpointing="none", compile=True).uses[Use.ACTIVATIONS]
    selective = trace(activation_checkpointing="selective", compile=True).uses[Use.ACTIVATIONS]
    # Compiled code keeps where relu has cut off, a byte each, where the operators keep its result alone.
    assert selective < compiled <= eager + LAYERS * TOKENS * WIDE + 64 * TOKENS


def test_products_in_8_bits_are_traced_as_such() -> None:
    pytest.importorskip("torchao", reason="needs the extra fp8")
    found = {precision: trace(kind="fsdp", precision=precision).uses for precision in ("bf16", "fp8")}
    assert found["fp8"][Use.OPTIMIZER] == found["bf16"][Use.OPTIMIZER]
    assert found["fp8"] != found["bf16"]
