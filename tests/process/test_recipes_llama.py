"""The Llama under DDP, FSDP2, mixed precision, activation checkpointing and compilation, on two ranks of this file's `main`."""

import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchruns import warm_ranks

import recipes.llama.task
from elastictrain.config.composed import ParallelGroup, TrainGroup
from elastictrain.distributed.wrapping import Wrapping, mesh_shape
from elastictrain.train.parameters import build_model, fill, float8_layers
from recipes.llama.config import LlamaConfig
from recipes.llama.task import LlamaTask

CONFIG = LlamaConfig(vocab_size=264, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, max_seq_len=32)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """How the model is wrapped."""

    kind: Literal["ddp", "fsdp"]
    precision: Literal["fp32", "bf16", "fp8"]
    tied: bool = False
    compiled: bool = False
    checkpointing: Literal["none", "selective", "full"] = "none"


CASES = (
    Case("ddp", "fp32", checkpointing="full"),
    Case("ddp", "bf16", compiled=True),
    Case("ddp", "bf16", tied=True),
    Case("fsdp", "fp32", compiled=True),
    Case("fsdp", "fp32", tied=True),
    Case("fsdp", "bf16", tied=True, compiled=True),
    Case("fsdp", "bf16", checkpointing="selective"),
    Case("ddp", "fp8"),
    Case("fsdp", "fp8", compiled=True, checkpointing="selective"),
)
_FARTHEST = {"fp32": (1e-6, 1e-5), "bf16": (1e-3, 3e-2), "fp8": (1e-3, 0.2)}  # loss and gradients, relative


def test_every_wrapping_computes_the_same(tmp_path: Path) -> None:
    assert "alike" in warm_ranks([__file__], world_size=2, folder=tmp_path, timeout_s=240)


def tokens_of_everybody() -> Tensor:
    return torch.randint(0, 257, (4, 25), generator=torch.Generator().manual_seed(0))


def reference(task: LlamaTask) -> tuple[float, dict[str, Tensor], str]:
    """Loss of the whole batch, its gradients, and the text shown, in one process without any wrapping."""
    model = build_model(task, seed=7, device=CPU)
    fill(model, task, seed=7, device=CPU)
    output = task.loss(model, {"tokens": tokens_of_everybody()})
    output.loss_sum.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.loss_sum.item(), gradients, task.show_sample(model, device=CPU, seed=0)


def wrapped(task: LlamaTask, case: Case, *, counter: Any) -> tuple[float, dict[str, Tensor], str]:
    """The same by two ranks, each with half of the batch."""
    parallel = ParallelGroup(kind=case.kind)
    train = TrainGroup(
        steps=1, global_batch=4, micro_batch=2, precision=case.precision, activation_checkpointing=case.checkpointing
    )
    shape = mesh_shape(parallel, world_size=2, local_world_size=2)
    model = build_model(task, seed=7, device=CPU)
    blocks = task.blocks(model)
    if counter is not None:
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
    wrapping = Wrapping(shape, parallel, train, CPU)
    wrapping.wrap(model, blocks, float8=float8_layers(task, model) if case.precision == "fp8" else ())
    fill(model, task, seed=7, device=CPU)
    ready = wrapping.finish(model)
    ready.float8.renew()
    mine = tokens_of_everybody().chunk(2)[dist.get_rank()]
    with ready.precision_context():
        output = task.loss(ready.module, {"tokens": mine})
    output.loss_sum.backward()
    total = output.loss_sum.detach().clone()
    dist.all_reduce(total)
    gradients = {name: whole(parameter) * ready.shape.world_size for name, parameter in ready.bare.named_parameters()}
    return total.item(), gradients, task.show_sample(ready.module, device=CPU, seed=0)


def whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative difference of a gradient."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def main() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # takes too long for a process that only collects tests

    recipes.llama.task._SHOWN_TOKENS = 120  # as people see it; the host of forks shows less
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    in_8_bits = set()
    for case in CASES:
        task = LlamaTask(model=replace(CONFIG, tie_embeddings=case.tied), loss_chunk_tokens=16)
        loss, gradients, text = reference(task)
        counter = CompileCounterWithBackend("aot_eager") if case.compiled else None
        got_loss, got_gradients, got_text = wrapped(task, case, counter=counter)
        exact, (farthest, farthest_gradient) = case.precision == "fp32", _FARTHEST[case.precision]
        assert abs(got_loss - loss) <= farthest * loss, (case, got_loss, loss)
        assert distance(got_gradients, gradients) <= farthest_gradient, case
        if case.precision == "fp8":
            in_8_bits.add(got_loss)
        assert not exact or got_text == text, (case, got_text, text)
        # One graph serves all layers, and showing a sample compiles nothing.
        assert counter is None or counter.frame_count == 1, (case, counter.frame_count)
        torch._dynamo.reset()
    # Weights that are gathered in 8 bits are those that torchao casts.
    assert len(in_8_bits) == 1, in_8_bits
    if dist.get_rank() == 0:
        sys.stdout.write("alike\n")
    dist.barrier()
    sys.stdout.flush()
    # gloo may abort when the interpreter takes its threads down.
    os._exit(0)


if __name__ == "__main__":
    main()
