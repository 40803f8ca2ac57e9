"""Mistakes in tasks and data: what is found before the start names the method."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from elastictrain.config.composed import ParallelGroup, RunConfig, TaskGroup
from elastictrain.config.task_signature import build_task
from elastictrain.errors import EXIT_CONFIG, ConfigError, TaskError
from elastictrain.fault.reasons import classify_exit
from elastictrain.identity import Identity
from elastictrain.train.checks import open_samples
from elastictrain.train.context import TrainContext
from elastictrain.train.loss import compute_loss
from elastictrain.train.task import Task
from elastictrain.train.trial import try_task
from tests.unit.train.parts import context_of
from tests.unit.train.test_loop import config

TASKS = "tests.integration.train.mistaken_tasks"


def configuration(name: str, *, kind: str = "ddp", workers: int = 0, global_batch: int = 10) -> RunConfig:
    """Chunks of four samples; the last one of a step has two."""
    plain = config(steps=5, eval_every=1)
    return replace(
        plain,
        task=TaskGroup(f"{TASKS}.{name}", {}),
        train=replace(plain.train, global_batch=global_batch, micro_batch=4),
        data=replace(plain.data, workers=workers),
        parallel=ParallelGroup(kind=kind),  # type: ignore[arg-type]
    )


def start(name: str, *, world_size: int = 1, **keys: Any) -> TrainContext:
    """What a worker does before it meets others."""
    chosen = configuration(name, **keys)
    task = cast(Task, build_task(chosen))
    identity = Identity(0, world_size, 0, world_size, "here", launched=True)
    context = context_of(task=task, config=chosen, samples=open_samples(task, chosen), identity=identity)
    try_task(context)
    return context


MISTAKES = [
    ("WithOfLengths", "OfLengths.__getitem__", True),
    ("WithOfTypes", "OfTypes.__getitem__", True),
    ("WithOfKeys", "OfKeys.__getitem__", True),
    ("WithOfObjects", "OfObjects.__getitem__", True),
    ("WithOfTexts", "OfTexts.__getitem__", False),
    ("WithOfMissingFiles", "OfMissingFiles.__getitem__", True),
    ("WithOfItsOwnRandomness", "OfItsOwnRandomness.__getitem__", True),
    ("WithOfItsOwnArrays", "OfItsOwnArrays.__getitem__", True),
    ("WithOfItsOwnSizes", "OfItsOwnSizes.__getitem__", True),
    ("WithWithoutLength", "WithWithoutLength.train_dataset", False),
    ("WithStream", "WithStream.train_dataset", False),
    ("NoSamples", "NoSamples.train_dataset", False),
    ("NoDataset", "NoDataset.train_dataset", False),
    ("FailingDataset", "FailingDataset.eval_dataset", False),
    ("FailingCollate", "FailingCollate.collate", True),
    ("CollateToNothing", "CollateToNothing.collate", False),
    ("NoModel", "NoModel.build_model", False),
    ("FrozenModel", "FrozenModel.build_model", False),
    ("FailingModel", "FailingModel.build_model", False),
    ("StrangeBlocks", "StrangeBlocks.blocks", False),
    ("ScalarLoss", "ScalarLoss.loss", True),
    ("LossPerSample", "LossPerSample.loss", True),
    ("NumberAsWeight", "NumberAsWeight.loss", True),
    ("WeightElsewhere", "WeightElsewhere.loss", True),
    ("HalfLoss", "HalfLoss.loss", True),
    ("LossWithoutGradient", "LossWithoutGradient.loss", True),
    ("WeightWithGradient", "WeightWithGradient.loss", True),
    ("FailingLoss", "FailingLoss.loss", True),
    ("WrongShapes", "WrongShapes.loss", True),
    ("MetricsAsList", "MetricsAsList.loss", True),
    ("MetricPerSample", "MetricPerSample.loss", True),
    ("ForwardItself", "ForwardItself.loss", False),
    ("TwoCalls", "TwoCalls.loss", False),
    ("PartOfTheModel", "PartOfTheModel.loss", True),
    ("LossOfOne", "LossOfOne.loss", False),
    ("CollateOfTwo", "CollateOfTwo.collate", False),
    ("BlocksNotCallable", "BlocksNotCallable.blocks", False),
    ("FailingConstructor", "FailingConstructor.__init__", False),
    ("NoCount", "NoCount.tokens_per_sample", False),
]


@pytest.mark.parametrize(("name", "method", "has_position"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_a_mistake_is_named_before_the_start(name: str, method: str, has_position: bool) -> None:
    with pytest.raises(TaskError) as caught:
        start(name)
    error = caught.value
    assert (error.method, error.exit_code) == (method, EXIT_CONFIG)
    assert (error.position is not None) == has_position
    ended = classify_exit(error, where="start", in_collective=False, last_heard={})
    assert (ended.exit_code, ended.show_stack) == (EXIT_CONFIG, False)
    # One sentence, in which the method has its place.
    first = str(error).splitlines()[0]
    assert method in first
    assert ("mistaken_tasks.py:" in first) == (name not in {"BlocksNotCallable"})


@pytest.mark.parametrize(("name", "wanted"), [("NoLoss", "must name a class"), ("Missing", "must name a class")])
def test_a_class_that_is_no_task(name: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(name)
    assert [problem.key for problem in caught.value.problems] == ["task._target_"]


@pytest.mark.parametrize(
    ("name", "at"),
    [("FailingLoss", "'label'"), ("FailingModel", "width"), ("FailingConstructor", "VOCABULARY"), ("FailingDataset", "split")],
)
def test_an_exception_has_its_message_and_the_frames_of_the_users_code_alone(name: str, at: str) -> None:
    with pytest.raises(TaskError) as caught:
        start(name)
    first, *frames = str(caught.value).splitlines()
    assert at in first
    files = [line for line in frames if line.lstrip().startswith("File ")]
    assert files
    assert all("mistaken_tasks.py" in line for line in files)


RIGHT = ["Right", "RightWithTuples", "RightWithCollate", "RightWithItems", "RightWithNorm"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_and_leaves_nothing_behind(name: str, workers: int, kind: str) -> None:
    context = start(name, kind=kind, workers=workers, world_size=2)
    batch = context.samples.train.read(range(4), first=0)
    output = compute_loss(context.task.loss, context.task.build_model(), batch, first=0)
    assert output.loss_sum.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("WithUnpicklable", {"workers": 1}),
        ("UnusedParameters", {"world_size": 2}),
        # Chunks of four and one of one.
        ("OneValueForTheNorm", {"global_batch": 9}),
    ],
)
def test_what_only_some_configurations_refuse(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(TaskError) as caught:
        start(name, **keys)
    assert caught.value.exit_code == EXIT_CONFIG
    start(name)


def test_what_needs_a_group_or_more_memory_is_left_to_the_first_step() -> None:
    start("RightWithGroup")


def test_only_ddp_waits_for_gradients_and_hides_attributes() -> None:
    start("UnusedParameters", kind="fsdp", world_size=2)
    start("PartOfTheModel", kind="fsdp", world_size=2)


def test_a_sample_that_is_wrong_later_is_named_by_its_position() -> None:
    context = start("WithOfLateLengths", global_batch=4)
    with pytest.raises(TaskError) as caught:
        context.samples.train.read([4, 13, 6], first=1000)
    error = caught.value
    assert (error.method, error.position, error.exit_code) == ("OfLateLengths.__getitem__", 1001, EXIT_CONFIG)
    # Only this rank finds it: the others are told.
    assert classify_exit(error, where="step 100", in_collective=False, last_heard={}).alone


def test_a_loss_that_is_wrong_later_is_named_by_its_position() -> None:
    task = cast(Task, build_task(configuration("ScalarLoss")))
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2)}
    with pytest.raises(TaskError) as caught:
        compute_loss(task.loss, task.build_model(), batch, first=96)
    assert (caught.value.method, caught.value.position) == ("ScalarLoss.loss", 96)
    with pytest.raises(TaskError) as caught:
        compute_loss(partial(task.loss), task.build_model(), batch, first=96)
    assert caught.value.method == "ScalarLoss.loss"


def test_a_label_out_of_range_is_named_by_its_position() -> None:
    """The meta device, on which the task is tried, does not see values."""
    context = start("LabelOutOfRange")
    batch = context.samples.train.read(range(4), first=96)
    batch["y"][1] = 4  # type: ignore[index]
    with pytest.raises(TaskError) as caught:
        compute_loss(context.task.loss, context.task.build_model(), batch, first=96)
    assert (caught.value.method, caught.value.position) == ("LabelOutOfRange.loss", 96)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device of this mistake is there")
def test_a_device_that_is_not_there_is_named_before_the_start() -> None:
    with pytest.raises(TaskError) as caught:
        start("ModelOnAnotherDevice")
    assert caught.value.method == "ModelOnAnotherDevice.build_model"


def test_what_may_be_of_the_moment_is_tried_again() -> None:
    """An error of the network at the start is no error of the configuration."""
    context = start("Right")

    def unreachable(*_: object) -> None:
        raise ConnectionResetError("the server is gone")

    dataset = type("Remote", (), {"__len__": lambda _: 16, "__getitem__": unreachable})()
    context.samples = replace(context.samples, train=replace(context.samples.train, dataset=dataset))
    with pytest.raises(ConnectionResetError):
        try_task(context)
