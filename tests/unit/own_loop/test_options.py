"""Options of a loop of one's own are keys of the configuration, and mistakes name them."""

import subprocess
import sys

import pytest

import elastictrain
from elastictrain.errors import ConfigError
from elastictrain.own_loop.options import CommandLineOptions, launcher_config, own_config


def test_options_reach_the_configuration() -> None:
    config = own_config("runs/x", {"checkpoint": {"every_steps": 7}, "run": {"seed": 3}})
    assert (config.run.dir, config.run.seed, config.checkpoint.every_steps) == ("runs/x", 3, 7)
    assert config.task.target == "elastictrain.attach"


def test_an_evaluation_may_take_longer_than_a_save() -> None:
    fault = own_config("runs/mine", {"fault": {"init_timeout_s": 1800}}).fault
    assert fault.init_timeout_s == fault.step_timeout_s == 1800 < fault.save_timeout_s


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"checkpoint": {"every_step": 7}}, "checkpoint.every_step"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last"),
        ({"train": {"steps": 3}}, "train"),
        ({"fault": 3}, "fault"),
        ({"run": {"dir": "x"}}, "run.dir"),
        ({"fault": {"step_timeout_s": 3}}, "fault.step_timeout_s"),
        ({"fault": {"on_poisoned": "skip"}}, "fault.on_poisoned"),
    ],
)
def test_mistakes_name_the_key(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_config("runs/x", options)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_the_launcher_of_a_program_refuses_to_skip_steps_too() -> None:
    assert launcher_config(("run.dir=x", "fault.on_poisoned=back")).fault.on_poisoned == "back"
    with pytest.raises(ConfigError) as caught:
        launcher_config(("run.dir=x", "fault.on_poisoned=skip"))
    assert [problem.key for problem in caught.value.problems] == ["fault.on_poisoned"]


@pytest.mark.parametrize("url", ["", 3])
def test_the_folder_must_be_named(url: object) -> None:
    with pytest.raises(ConfigError) as caught:
        own_config(url, {})  # type: ignore[arg-type]
    assert "url" in [problem.key for problem in caught.value.problems]


LINE = ("run.dir=runs/x", "checkpoint.every_steps=7", "preflight=off", "preflight.limits.storage_s=3")


def test_keys_of_the_command_line_count_in_the_program() -> None:
    given: dict[str, object] = {"checkpoint": {"keep_last": 5}, "preflight": {"level": "off", "limits": {"contact_s": 4.0}}}
    config = own_config("./runs/x", given, line=CommandLineOptions(LINE))
    assert (config.checkpoint.every_steps, config.checkpoint.keep_last, config.preflight.level) == (7, 5, "off")
    assert (config.preflight.limits.storage_s, config.preflight.limits.contact_s) == (3, 4)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"checkpoint": {"every_steps": 8}}, "checkpoint.every_steps"),
        ({"checkpoint": {"memory_dir": "/tmp"}}, "checkpoint.memory_dir"),
        ({"fault": {"notice_s": 5.5}}, "fault.notice_s"),
        ({"preflight": {"level": "full"}}, "preflight.level"),
        ({"run": {"on_held": "wait"}}, "run.on_held"),
    ],
)
def test_a_contradiction_to_the_command_line_is_named(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_config("runs/x", options, line=CommandLineOptions(LINE))
    assert [problem.key for problem in caught.value.problems] == [key]


def test_another_folder_than_that_of_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        own_config("runs/y", {}, line=CommandLineOptions(LINE))
    assert [problem.key for problem in caught.value.problems] == ["run.dir"]


def test_what_a_launcher_knows_of_a_program() -> None:
    config = launcher_config([*LINE, "launch.processes=2"])
    assert (config.run.dir, config.launch.processes, config.launch.standbys) == ("runs/x", 2, 0)
    assert config.train.global_batch > 2**20, "no host is left out for want of samples"


@pytest.mark.parametrize(
    "key", ["train.steps=3", "recipe=llama_tiny", "launch.standbys=1", "parallel=fsdp", "run.num_threads=2"]
)
def test_keys_without_effect_on_a_program_are_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launcher_config([*LINE, key])
    assert [problem.key for problem in caught.value.problems] == [key.partition("=")[0]]


def test_a_launcher_must_know_the_folder() -> None:
    with pytest.raises(ConfigError) as caught:
        launcher_config(["preflight=off"])
    assert [problem.key for problem in caught.value.problems] == ["run.dir"]


def test_the_package_has_the_names_that_it_lists() -> None:
    for name in elastictrain.__all__:
        assert getattr(elastictrain, name)
    assert set(elastictrain.__all__) <= set(dir(elastictrain))
    with pytest.raises(AttributeError):
        _ = elastictrain.nothing


def test_importing_the_package_imports_nothing_large() -> None:
    program = "import sys, elastictrain; sys.exit(int(any(name in sys.modules for name in ('torch', 'hydra', 'numpy'))))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
