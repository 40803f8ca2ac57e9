"""Sweeps are refused with what to type instead."""

import re
import subprocess
from collections.abc import Callable

import pytest

from elastictrain.config.command_line import parse_overrides, read_command_line
from elastictrain.errors import UsageError


@pytest.mark.parametrize(
    "refused",
    [
        lambda: read_command_line(["-m", "optim.lr=1,2"]),
        lambda: read_command_line(["--multirun"]),
        lambda: parse_overrides(["optim.lr=1,2"], known={"recipe": ["a"]}),
        lambda: parse_overrides(["train.steps=range(1,3)"], known={"recipe": ["a"]}),
    ],
)
def test_a_sweep_is_refused_with_a_loop_that_a_shell_runs(refused: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        refused()
    (loop,) = re.findall("for .* done", str(caught.value))
    done = subprocess.run(["/bin/sh", "-c", loop.replace("COMMAND", "echo")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["optim.lr=1e-3 run.dir=runs/lr-1e-3", "optim.lr=3e-4 run.dir=runs/lr-3e-4"]
