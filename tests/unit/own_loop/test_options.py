"""Options of a loop of one's own are keys of the configuration, and mistakes name them."""

import subprocess
import sys

import pytest

import elastictrain
from elastictrain.errors import ConfigError
from elastictrain.own_loop.options import own_config


def test_options_reach_the_configuration() -> None:
    config = own_config("runs/x", {"checkpoint": {"every_steps": 7}, "run": {"seed": 3}})
    assert (config.run.dir, config.run.seed, config.checkpoint.every_steps) == ("runs/x", 3, 7)
    assert config.task.target == "elastictrain.attach"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"checkpoint": {"every_step": 7}}, "checkpoint.every_step"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last"),
        ({"train": {"steps": 3}}, "train"),
        ({"fault": 3}, "fault"),
        ({"run": {"dir": "x"}}, "run.dir"),
        ({"fault": {"step_timeout_s": 3}}, "fault.step_timeout_s"),
    ],
)
def test_mistakes_name_the_key(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_config("runs/x", options)
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize("url", ["", 3])
def test_the_folder_must_be_named(url: object) -> None:
    with pytest.raises(ConfigError) as caught:
        own_config(url, {})  # type: ignore[arg-type]
    assert "url" in [problem.key for problem in caught.value.problems]


def test_the_package_has_the_names_that_it_lists() -> None:
    for name in elastictrain.__all__:
        assert getattr(elastictrain, name)
    assert set(elastictrain.__all__) <= set(dir(elastictrain))
    with pytest.raises(AttributeError):
        _ = elastictrain.nothing


def test_importing_the_package_imports_nothing_large() -> None:
    program = "import sys, elastictrain; sys.exit(int(any(name in sys.modules for name in ('torch', 'hydra', 'numpy'))))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
