"""Arguments into a plain tree, through Hydra."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from elastictrain.config.compose import compose
from elastictrain.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def hydra_each_time(hydra_compose: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastictrain.config.compose.hydra_compose", hydra_compose)


def test_groups_values_and_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composed = compose(
        [
            "recipe=llama_tiny",
            "parallel=fsdp",
            "train.steps=7",
            "+task.a=1",
            "++b.c=2",
            "~optim.lr",
            "run.dir=s3://b/${train.steps}",
        ]
    )
    tree = composed.tree
    assert composed.problems == ()
    assert tree["parallel"] == {"kind": "fsdp", "backend": "auto", "device": "auto", "reshard_after_forward": True}
    assert (tree["train"]["steps"], tree["task"]["a"], tree["b"], tree["run"]["dir"]) == (7, 1, {"c": 2}, "s3://b/7")
    assert "lr" not in tree["optim"]
    assert not GlobalHydra().is_initialized()
    assert Path.cwd() == tmp_path
    assert os.listdir() == []  # noqa: PTH208


def test_a_group_can_be_left_out() -> None:
    composed = compose(["recipe=llama_tiny", "model=null"])
    assert composed.recipe == "llama_tiny"
    assert "model" not in composed.tree


def test_every_mistake_is_reported_by_its_key() -> None:
    composed = compose(
        [
            "recipe=llama_tiny",
            "parallel=fspd",
            "~optim.xx",
            "run.dir=${nowhere}",
            "data.cache_dir=${oc.env:NO_SUCH_VARIABLE_X}",
        ]
    )
    keys = {problem.key for problem in composed.problems}
    assert keys == {"parallel", "optim.xx", "run.dir", "data.cache_dir"}
    assert composed.partial
    assert [problem.key for problem in composed.problems if "fsdp?" in problem.message] == ["parallel"]


def test_every_misuse_of_the_command_line_is_told_at_once() -> None:
    wrong = ("data.path=(a", "hello", "=3", "train.steps=1,2", "hydra.run.dir=x", "model@here=tiny", "recipe=llama_tiny")
    with pytest.raises(UsageError) as caught:
        compose(["recipe=llama_tiny", "parallel=fspd", *wrong])
    assert str(caught.value).count("; `") == len(wrong) - 1
    assert "fspd" not in str(caught.value)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "my 'conf'"
    (folder / "recipe").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "extra").mkdir()
    (folder / "model" / "mine.yaml").write_text("width: 3\n")
    (folder / "extra" / "long.yaml").write_text("# @package _global_\ntrain:\n  steps: 99\n")
    (folder / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\nrun:\n  dir: here\n"
    )
    composed = compose(["--config-dir", str(folder), "recipe=mine", "extra=long"])
    assert composed.problems == ()
    assert composed.tree["model"] == {"width": 3}
    assert (composed.tree["run"]["dir"], composed.tree["train"]["steps"]) == ("here", 99)


def test_a_file_that_cannot_be_composed_is_one_config_error(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "bad.yaml").write_text("# @package _global_\ndefaults:\n  - override /parallel: fspd\n")
    with pytest.raises(ConfigError, match="parallel/fspd") as caught:
        compose(["--config-dir", str(tmp_path), "recipe=bad"])
    assert [problem.key for problem in caught.value.problems] == ["recipe=bad"]
    (tmp_path / "recipe" / "bad.yaml").write_text("a: [1\nb: }")
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "recipe=bad"])
    assert [problem.key for problem in caught.value.problems] == ["recipe=bad"]


def test_a_folder_must_exist_and_not_shadow_the_program(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}/none"):
        compose(["--config-dir", str(tmp_path / "none")])
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "llama_tiny.yaml").write_text("")
    with pytest.raises(UsageError, match=f"{tmp_path}/recipe/llama_tiny.yaml"):
        compose(["--config-dir", str(tmp_path)])
