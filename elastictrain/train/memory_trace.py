"""What a rank holds in memory in a step, found without that memory: the run's own model, wrapping, optimizer and step, on
tensors that have a size and no content, in a group that communicates with nobody."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast
from weakref import finalize

import torch
from torch import Tensor

from elastictrain.config.composed import RunConfig
from elastictrain.data.dataset import map_tensors
from elastictrain.data.loader import MicroBatch
from elastictrain.distributed.group import lone_group
from elastictrain.distributed.reattach import detach
from elastictrain.distributed.wrapping import MeshShape, Wrapping, mesh_shape
from elastictrain.identity import Identity
from elastictrain.liveness.progress import STEP_PHASES, Phase, ProgressTracker
from elastictrain.storage.store import Store
from elastictrain.torch_private_tracing import FakeTensorMode, TorchDispatchMode, tree_leaves
from elastictrain.train.compiled_memory import sizing_backend
from elastictrain.train.context import Samples, TrainContext
from elastictrain.train.optimizer import make_optimizers
from elastictrain.train.parameters import allocate, float8_layers, local
from elastictrain.train.step import Stepper
from elastictrain.train.task import HasBlocks, InitializesParameters, Task, UpdatesInTurn
from elastictrain.train.weight_average import WeightAverage

_DETACH_S = 10.0
_PASSES = 2  # what is kept from one pass to the next is kept once


class Use(StrEnum):
    """What memory is used for."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"


@dataclass(slots=True)
class AllocationSpan:
    """Memory that exists from one moment to another one; None: to the end."""

    num_bytes: int
    use: Use
    begin: int
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    num_bytes: int
    uses: Mapping[Use, int]  # of these bytes
    phase: str


def peak_of(spans: Sequence[AllocationSpan], *, phases: Sequence[tuple[int, str]]) -> Peak:
    """The moment with the most memory. `phases`: the moments at which they begin, ascending. Pure."""
    changes: Counter[int] = Counter()
    for one in spans:
        changes[one.begin] += one.num_bytes
        if one.end is not None:
            changes[one.end] -= one.num_bytes
    now, most, at = 0, 0, 0
    for moment in sorted(changes):
        now += changes[moment]
        if now > most:
            most, at = now, moment
    uses: Counter[Use] = Counter()
    for one in spans:
        if one.begin <= at and (one.end is None or at < one.end):
            uses[one.use] += one.num_bytes
    return Peak(most, uses, next((phase for moment, phase in reversed(phases) if moment <= at), ""))


@dataclass(slots=True)
class MemoryLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each storage that torch makes while this mode is on, until it is gone."""

    spans: list[AllocationSpan] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    _now: int = 0
    _held: dict[int, AllocationSpan] = field(default_factory=dict)  # by storage

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch compiles in spite of this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self.add(one)
        return found

    def add(self, tensor: Tensor) -> None:
        if not (tensor := local(tensor)).is_meta:
            self._note(tensor.untyped_storage(), Use.TEMPORARY)

    def hold(self, num_bytes: int) -> None:
        """Memory of this moment."""
        self.spans.append(AllocationSpan(num_bytes, Use.TEMPORARY, self._now, self._now + 1))
        self._now += 1

    def use_for(self, use: Use, tensors: Sequence[Tensor]) -> None:
        for one in tensors:
            self.add(one)
            self._held[local(one).untyped_storage()._cdata].use = use

    def enter(self, phase: Phase) -> None:
        """What is left of a forward pass is for the backward pass, and what is left of that are gradients."""
        if phase not in STEP_PHASES:
            return
        if self.phases and self.phases[-1][1] in (Phase.FORWARD, Phase.BACKWARD):
            forward = self.phases[-1][1] == Phase.FORWARD
            begin = next(moment for moment, name in reversed(self.phases) if name == Phase.FORWARD)
            for one in self._held.values():
                if one.begin >= begin and one.use in (Use.TEMPORARY, Use.ACTIVATIONS):
                    one.use = Use.ACTIVATIONS if forward else Use.GRADIENTS
        self.phases.append((self._now, phase))

    def peak(self) -> Peak:
        """Of the step: from the first phase on."""
        begin = self.phases[0][0] if self.phases else 0
        return peak_of([one for one in self.spans if one.end is None or one.end > begin], phases=self.phases)

    def _note(self, storage: torch.UntypedStorage, use: Use) -> None:
        self._now += 1
        key, num_bytes = storage._cdata, int(storage.nbytes())
        before = self._held.get(key)
        if before is None:
            finalize(storage, self._drop, key)
        elif before.num_bytes == num_bytes:
            return
        else:
            before.end, before.use = self._now, use
        self._held[key] = span = AllocationSpan(num_bytes, use, self._now)
        self.spans.append(span)

    def _drop(self, key: int) -> None:
        self._now += 1
        self._held.pop(key).end = self._now

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP gives memory back, and takes it again, by the size of a storage, which is no operator of torch's."""
        resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._held:
                self._note(storage, Use.GATHERED)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]


def trace_step(config: RunConfig, task: Task, identity: Identity, *, samples: Samples) -> Peak:
    """The memory of the rank `identity` in a step, whose micro-batches are all like the first one. Nothing else in this process
    may use torch's groups. Raises: whatever torch or the task raise where a tensor's content is asked for."""
    log, fake = MemoryLog(), FakeTensorMode(allow_non_fake_inputs=True)
    tracker = ProgressTracker()
    context = TrainContext(config, identity, tracker, lambda: None, lambda: None, "gloo", task, samples, cast(Store, None))
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        context.group = lone_group(identity, backend="gloo", on_gpu=False)
        stack.callback(detach, _DETACH_S)
        stack.callback(torch.compiler.reset)
        stack.enter_context(torch.compiler.set_stance("default", force_backend=sizing_backend(log.hold)))
        stepper = _build(context, fake, log)
        first = MicroBatch.read(samples.train, next(context.plan_passes(0, 1)))
        stack.enter_context(log.following_resizes())
        stack.enter_context(fake)
        stack.enter_context(log)
        number = min(context.share.passes_per_step, _PASSES)
        batches = [replace(first, batch=map_tensors(first.batch, torch.empty_like)) for _ in range(number)]
        tracker.follow(lambda mark: log.enter(mark.phase))
        stepper.run(1, iter(batches), passes=len(batches), rate=0.0)
    return log.peak()


def _build(context: TrainContext, fake: FakeTensorMode, log: MemoryLog) -> Stepper:
    config, identity, task, device = context.config, context.identity, context.task, context.group.device
    shape = mesh_shape(config.parallel, world_size=identity.world_size, local_world_size=identity.local_world_size)
    copied = config.parallel.kind == "ddp" and shape.replicas > 1
    # DDP itself works on content; alone it would not be used.
    shape = MeshShape(1, 1) if copied else shape
    wrapping = Wrapping(shape, config.parallel, config.train, device, in_part=isinstance(task, UpdatesInTurn))
    on_meta = isinstance(task, InitializesParameters)
    with torch.device("meta") if on_meta else fake:
        model = task.build_model()
    # Not in `fake`: a mesh has content, and so have the probes that show what state an optimizer makes.
    float8 = float8_layers(task, model) if config.train.precision == "fp8" else ()
    wrapping.wrap(model, task.blocks(model) if isinstance(task, HasBlocks) else (), float8=float8)
    if on_meta:
        with fake:
            allocate(model, device=device)
    wrapped = wrapping.finish(model)
    optimizers = make_optimizers(model, config.optim, task)
    average = WeightAverage.of(model, decay=config.train.ema) if config.train.ema is not None else None
    log.use_for(Use.PARAMETERS, [*model.parameters(), *model.buffers()])
    moments = [tensor for _, tensor in optimizers.tensors(model.named_parameters())]
    log.use_for(Use.OPTIMIZER, moments + ([*average.averages.values()] if average is not None else []))
    if copied:
        # The gradients are views of DDP's buckets, which stay.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                log.use_for(Use.GRADIENTS, [parameter.grad])
    return Stepper(context, wrapped, optimizers, average=average)
