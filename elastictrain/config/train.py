"""The group `train`: how much, in what portions, in which precision."""

from dataclasses import dataclass
from typing import Annotated, Literal

from elastictrain.config.constraints import Range


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """How much is trained, in what portions, in which precision."""

    steps: Annotated[int, Range(1)]
    """Optimizer steps of the whole run."""

    global_batch: Annotated[int, Range(1)]
    """Samples per optimizer step, whatever the world size."""

    micro_batch: Annotated[int, Range(1)]
    """Samples per rank and forward pass, at most; set by memory."""

    seq_len: Annotated[int, Range(1)] = 1
    """Tokens per sample; used by token files."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of forward and backward. Parameters, gradients' reduction and optimizer stay in float32."""

    clip_norm: Annotated[float, Range(0.0)] = 1.0
    """Gradients are scaled down to this global norm when theirs is larger; 0 for no clipping."""

    compile: bool = False
    """Compile each of the model's blocks (the whole model, if the task names no blocks) with torch.compile."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory: `full` keeps only each block's input, `selective` also keeps
    the results of every other matrix product and of attention."""

    max_skipped: Annotated[int, Range(0)] = 10
    """Non-finite steps in a row that are skipped before the run gives up."""

    eval_every_steps: Annotated[int, Range(0)] = 0
    """Optimizer steps between evaluations on held-out samples; 0 for none."""

    eval_samples: Annotated[int, Range(1)] = 256
    """Samples per evaluation, at most; the first ones of the held-out samples, the same each time."""
