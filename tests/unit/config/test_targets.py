"""Optimizers and schedules by dotted path: what is wrong with them is found before training, and names the key."""

import math
from typing import Any

import pytest

from elastictrain.config.load import load
from elastictrain.config.optim import OptimGroup
from elastictrain.config.targets import check_targets
from elastictrain.errors import ConfigError
from elastictrain.train.optimizer import learning_rate

HERE = "tests.unit.config.test_targets"
SGD = "torch.optim.SGD"


def halved(step: int, total_steps: int, *, at: float = 0.5) -> float:
    return 1.0 if step < at * total_steps else 0.5


def third(step: int) -> float:
    return 1 / 3


def late(step: int, total_steps: int) -> float:
    return 1.0 if step < total_steps else math.nan


def texts(step: int) -> Any:
    return "0.5"


def schedule(name: str, **arguments: object) -> OptimGroup:
    return OptimGroup(schedule={"_target_": f"{HERE}.{name}", **arguments})


@pytest.mark.parametrize(
    ("optim", "keys"),
    [
        (OptimGroup(), []),
        (OptimGroup(_target_=SGD, arguments={"momentum": 0.9}), []),
        (OptimGroup(arguments={"momentum": 0.9}), ["optim.arguments"]),
        (OptimGroup(_target_=SGD, arguments={"momentun": 0.9}), ["optim.arguments"]),
        (OptimGroup(_target_=SGD, arguments={"lr": 0.9}), ["optim.arguments"]),
        (OptimGroup(_target_=SGD, beta1=0.8, weight_decay=0.0), ["optim.beta1", "optim.weight_decay"]),
        (OptimGroup(_target_="torch.optim.SDG"), ["optim._target_"]),
        (OptimGroup(_target_="SGD"), ["optim._target_"]),
        (OptimGroup(_target_="no_such_package.SGD"), ["optim._target_"]),
        (schedule("halved"), []),
        (schedule("halved", at=0.25), []),
        (schedule("third"), []),
        (schedule("halved", when=0.25), ["optim.schedule._target_"]),
        (schedule("late"), ["optim.schedule._target_"]),
        (schedule("texts"), ["optim.schedule._target_"]),
        (schedule("missing"), ["optim.schedule._target_"]),
        (OptimGroup(schedule={"at": 0.5}), ["optim.schedule._target_"]),
    ],
)
def test_problems_name_their_key(optim: OptimGroup, keys: list[str]) -> None:
    assert [problem.key for problem in check_targets(optim, total_steps=10)] == keys


def test_all_problems_come_with_the_others_when_the_configuration_is_composed() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["recipe=llama_tiny", "optim._target_=torch.optim.SDG", "fault.heartbeat_s=-1"])
    assert {problem.key for problem in caught.value.problems} == {"optim._target_", "fault.heartbeat_s"}


def test_from_the_command_line_to_the_rate() -> None:
    config = load(
        ["recipe=llama_tiny", "optim.lr=2.0", "train.steps=40", f"optim.schedule={{_target_: {HERE}.halved, at: 0.75}}"]
    )
    warmup = config.optim.warmup_steps
    rates = [learning_rate(step, config.optim, total_steps=40) for step in range(1, 41)]
    assert rates[:warmup] == [2.0 * step / warmup for step in range(1, warmup + 1)]
    assert rates[warmup:] == [2.0] * (29 - warmup) + [1.0] * 11
