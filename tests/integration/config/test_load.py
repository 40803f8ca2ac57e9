"""From arguments to RunConfig, all problems at once, and back from a stored config.yaml."""

from pathlib import Path

import pytest
import torch

from elastictrain.config.compose import own_conf
from elastictrain.config.digest import config_digest, from_yaml, to_yaml
from elastictrain.config.load import check_tree, load
from elastictrain.config.task_signature import build_task
from elastictrain.errors import EXIT_CONFIG, ConfigError

RECIPES = sorted(file.stem for file in (own_conf() / "recipe").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("choice", "minutes"), [("minutes", 10.0), ("end", 0.0)])
def test_checkpoints_are_made_as_the_command_line_chooses(recipe: str, choice: str, minutes: float) -> None:
    checkpoint = load([f"recipe={recipe}", f"checkpoint={choice}"]).checkpoint
    assert (checkpoint.every_steps, checkpoint.every_minutes) == (0, minutes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_round_trips(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling imports a compiler, which takes seconds, and deprecated parts of torch.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config = load([f"recipe={recipe}"])
    assert config.run.dir == f"runs/{recipe}"
    assert ("prompt" in config.task.options) == recipe.startswith("llama")
    again, problems = check_tree(from_yaml(to_yaml(config), source="config.yaml"), with_task=True)
    assert problems == []
    assert again == config
    assert type(build_task(config)).__name__ in config.task.target


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_three_steps_long(recipe: str) -> None:
    assert load([f"recipe={recipe}", "train.steps=3"], with_task=False).train.steps == 3


def test_a_stored_config_is_itself_a_recipe(tmp_path: Path) -> None:
    config = load(["recipe=llama_tiny", "parallel=fsdp", r"run.dir='a\${b}'", "run.seed=5"], with_task=False)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "again.yaml").write_text(to_yaml(config))
    again = load(["--config-dir", str(tmp_path), "recipe=again"], with_task=False)
    assert config_digest(again) == config_digest(config)


def keys_and_messages(arguments: list[str], *, with_task: bool = True) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(arguments, with_task=with_task)
    assert caught.value.exit_code == EXIT_CONFIG
    return {problem.key: problem.message for problem in caught.value.problems}


def test_everything_wrong_is_reported_at_once() -> None:
    found = keys_and_messages(
        [
            "recipe=llama_tiny",
            "train.micro_batch=64",
            "data.holdout_samples=0",
            "fault.step_timeout_s=1e4",
            "seed=3",
            "model.dim=x",
            "task.foo=1",
            "telemetry.progress=false",
            "checkpoint=never",
        ]
    )
    assert set(found) == {
        "train.micro_batch",
        "train.eval_every_steps",
        "fault.step_timeout_s",
        "seed",
        "model.dim",
        "task.foo",
        "telemetry.progress",
        "checkpoint",
    }
    assert "`run.seed`" in found["seed"]


def test_without_a_recipe_the_first_thing_said_is_to_choose_one() -> None:
    found = keys_and_messages([])
    mandatory = ["run.dir", "task._target_", "train.steps", "train.global_batch", "train.micro_batch"]
    assert sorted(found) == sorted(["recipe", *mandatory])
    assert next(iter(found)) == "recipe"
    assert "llama_tiny" in found["recipe"]


def test_a_recipe_misspelt_does_not_bring_a_list_of_missing_keys() -> None:
    assert set(keys_and_messages(["recipe=lama_tiny", "train.steps=0"])) == {"recipe", "train.steps"}


def test_a_key_that_cannot_be_resolved_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["recipe=llama_tiny", "run.dir=${x}"], with_task=False)
    assert [problem.key for problem in caught.value.problems] == ["run.dir"]


def test_a_group_must_be_a_group() -> None:
    _, problems = check_tree({"train": 3, "task": {"_target_": 5}}, with_task=False)
    found = {problem.key: problem.message.split()[-1] for problem in problems}
    assert (found["train"], found["task._target_"]) == ("3", "5")
