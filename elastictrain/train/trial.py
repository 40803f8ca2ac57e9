"""Tries a task before any process group exists: a micro-batch, and its loss on tensors without memory."""

import copy
import inspect
import io
import logging
import pickle
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastictrain.config.composed import RunConfig
from elastictrain.config.user_code import calling, describe_value, refuse
from elastictrain.data.assignment import sample_at
from elastictrain.data.dataset import Batch, Sample, leaves, map_tensors
from elastictrain.data.samples import SampleReader
from elastictrain.errors import TaskError
from elastictrain.train.context import TrainContext
from elastictrain.train.loss import compute_loss
from elastictrain.train.parameters import build_model, fill, float8_layers
from elastictrain.train.task import PROTOCOLS, CountsFlops, HasBlocks, Task, UpdatesInTurn

logger = logging.getLogger(__name__)

_MOST_BYTES = 100_000_000  # a model up to this size is tried on the CPU where the meta device does not do
_LEAF_TYPES = (Tensor, str, bytes, bool, int, float, type(None))
# What is said of a device may be wrong on another one; there is no group yet; what is too large is for the check of memory.
_UNCLEAR = re.compile(
    r"meta|cuda|gpu|cpu|device|triton|not ?implemented|data pointer|process group|memory|overflow", re.IGNORECASE
)
_META, _CPU = torch.device("meta"), torch.device("cpu")


def try_task(context: TrainContext) -> None:
    """Raises: TaskError for the first thing that the task or its data do wrong."""
    config, task = context.config, context.task
    share = context.share
    # The last chunk of a step may be smaller than the others.
    sizes = {share.chunk_size, share.global_batch % share.chunk_size or share.chunk_size}
    _check_signatures(task)
    # Nothing is compiled for tensors that training never sees.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        train = replace(context.samples.train, dataset=as_sent(context)) if config.data.workers else context.samples.train
        num_samples, seed, shuffle = len(train), config.run.seed, config.data.shuffle
        ids = [sample_at(one, num_samples=num_samples, seed=seed, shuffle=shuffle) for one in range(max(sizes))]
        sample = _check_repeatable(train, ids[0])
        if isinstance(task, CountsFlops):
            _try_counts(task, sample)
        batches = [_try_batch(task, train, ids[:size]) for size in sorted(sizes)]
        evaluated = None
        if config.train.eval_every_steps and (held_out := context.samples.held_out) is not None:
            size = min(config.train.micro_batch, config.train.eval_samples, len(held_out))
            evaluated = _try_batch(task, held_out, range(size))
        # What the task keeps of the trial is not the run's.
        _try_model(context, copy.copy(task), batches, evaluated)


def _check_signatures(task: Task) -> None:
    for protocol in PROTOCOLS:
        for name in vars(protocol):
            method = getattr(task, name, None)
            if name.startswith("_") or method is None:
                continue
            _, *wanted = inspect.signature(getattr(protocol, name)).parameters.values()
            must = f"take ({', '.join(one.name for one in wanted)})"
            if not callable(method):
                raise refuse(task, name, f"be a method and {must}", f"is {describe_value(method)}")
            given = [one.name for one in wanted if one.kind is not one.KEYWORD_ONLY]
            try:
                inspect.signature(method).bind(*given, **{one.name: None for one in wanted[len(given) :]})
            except TypeError:
                raise refuse(task, name, must, f"takes {inspect.signature(method)}") from None


def as_sent(context: TrainContext) -> Any:
    """The dataset as data workers get it; large arrays stay where they are. What it opens when it is read must not be open
    when it is sent to them. Raises: TaskError if it cannot be sent."""
    dataset, kept = context.samples.train.dataset, list[object]()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> int | None:
            if not isinstance(value, Tensor) and type(value).__module__ != "numpy":
                return None
            kept.append(value)
            return len(kept) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> object:
            return kept[number]

    file = io.BytesIO()
    try:
        Pickler(file).dump((dataset, context.samples.train.collate))
        file.seek(0)
        return Unpickler(file).load()[0]
    except Exception as error:
        must = "return a dataset (and `collate` be of a task) that pickle can send to data workers, or data.workers must be 0"
        raise refuse(context.task, "train_dataset", must, f"pickle says {type(error).__name__}: {error}") from error


def _check_repeatable(reader: SampleReader, sample_id: int) -> Sample:
    """The sample at position 0, if it is the same when it is read again."""
    with calling(reader.dataset, "__getitem__", at=f" of sample {sample_id}", position=0):
        sample, again = (reader.read_one(sample_id, position=0) for _ in range(2))
    if any(_differ(one, other) for one, other in zip(leaves(sample), leaves(again), strict=False)):
        must = (
            "draw random numbers from torch, `random` or `numpy.random`, which are seeded for each sample (or from "
            "`numpy.random.default_rng(random.getrandbits(64))`)"
        )
        raise refuse(reader.dataset, "__getitem__", must, f"read sample {sample_id} twice with two results", position=0)
    return sample


def _differ(one: Any, other: Any) -> bool:
    if type(one).__module__ == "numpy" and one.dtype.kind in "biuf":
        return _differ(torch.as_tensor(one), torch.as_tensor(other))
    if isinstance(one, Tensor):
        return one.shape != other.shape or not torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all()
    return isinstance(one, int | float | str | bytes) and repr(one) != repr(other)


def _try_batch(task: Task, reader: SampleReader, ids: Sequence[int]) -> Batch:
    owner, method = (reader.dataset, "__getitem__") if reader.collate is None else (task, "collate")
    with calling(reader.dataset, "__getitem__", position=0):
        samples = reader.samples(ids, first=0)
    with calling(owner, method, at=f" of {len(ids)} samples", position=0):
        batch = reader.join(samples, first=0)
    found = [one for one in leaves(batch) if not isinstance(one, _LEAF_TYPES)]
    if found or not any(isinstance(one, Tensor) for one in leaves(batch)):
        must = "make a micro-batch of tensors in mappings, lists or tuples"
        raise refuse(owner, method, must, f"made {describe_value(found[0] if found else batch)}")
    return batch


class ModelUnderDDP(nn.Module):
    """Hides the model's attributes, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: object, **named: object) -> object:
        return self.module(*arguments, **named)


def _try_model(context: TrainContext, task: Task, batches: Sequence[Batch], evaluated: Batch | None) -> None:
    """On the meta device; where that does not do, on the CPU if the model is small. What is still unclear then is left to the
    first step."""
    small = False
    try:
        with torch.device(_META):
            model = _build(task, context.config)
        small = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) <= _MOST_BYTES
        _try_loss(context, task, model, map_tensors([*batches, evaluated], lambda tensor: tensor.to(_META)))
        return
    except TaskError as error:
        found = error
    if small and found.__cause__ is not None:
        try:
            model = build_model(task, seed=context.config.run.seed, device=_CPU)
            fill(model, task, seed=context.config.run.seed, device=_CPU)
            _try_loss(context, task, model, [*batches, evaluated])
            return
        except TaskError as error:
            found = error
    cause = found.__cause__
    no_device = re.search("cuda|nvidia", str(cause), re.IGNORECASE) and not torch.cuda.is_available()
    if cause is None or no_device or not _UNCLEAR.search(f"{type(cause).__name__} {cause}"):
        raise found
    logger.info("the model is not tried before the start: %s", found)


def _build(task: Task, config: RunConfig) -> nn.Module:
    with calling(task, "build_model"):
        model: object = task.build_model()
    if not isinstance(model, nn.Module):
        raise refuse(task, "build_model", "return a torch.nn.Module", f"returned {describe_value(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise refuse(task, "build_model", "return a model with parameters to train", f"{describe_value(model)} has none")
    if isinstance(task, HasBlocks):
        with calling(task, "blocks"):
            blocks: list[object] = list(task.blocks(model))
        known = set(model.modules())
        if strange := [one for one in blocks if one not in known]:
            raise refuse(task, "blocks", "return modules within the model", f"returned {describe_value(strange[0])} beside it")
    if config.train.precision == "fp8":
        with calling(task, "float8_layers"):
            float8_layers(task, model)
    return model


def _try_loss(context: TrainContext, task: Task, model: nn.Module, batches: Sequence[Batch | None]) -> None:
    """`batches`: those of training, and at the end the one of an evaluation."""
    calls: list[object] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    ddp = context.config.parallel.kind == "ddp"
    module = ModelUnderDDP(model) if ddp else model
    *trained, evaluated = batches
    passes: list[tuple[str, Any]] = [("loss", task.loss)]
    if isinstance(task, UpdatesInTurn):
        passes = [("update_loss", partial(task.update_loss, name)) for name in task.updates]
    for batch in trained:
        for method, loss in passes:
            calls.clear()
            with calling(task, method, position=0):
                output = compute_loss(loss, module, cast(Batch, batch), first=0)
                output.loss_sum.backward()  # type: ignore[no-untyped-call]
            if method == "loss" and len(calls) != 1:
                raise refuse(task, "loss", "call model(...) exactly once", f"called it {len(calls)} times")
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused and ddp and context.identity.world_size > 1:
        must = "use all parameters of the model that are trained (`requires_grad`), since DDP waits for the gradient of each"
        raise refuse(task, passes[0][0], must, f"does not use {', '.join(unused[:4])}{' and others' * (len(unused) > 4)}")
    if evaluated is not None:
        module.eval()
        with torch.no_grad(), calling(task, "loss", at=" in evaluation", position=0):
            compute_loss(task.loss, module, evaluated, first=0)


def _try_counts(task: CountsFlops, sample: Sample) -> None:
    with calling(task, "tokens_per_sample"):
        number: object = task.tokens_per_sample(sample)
    if not isinstance(number, int) or number < 1:
        raise refuse(task, "tokens_per_sample", "return a whole number >= 1", f"returned {number!r}")
