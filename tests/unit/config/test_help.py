"""What is printed instead of training."""

import pytest

from elastictrain.config.help import text_asked_for
from elastictrain.config.schema import all_keys
from elastictrain.errors import UsageError


def text(*arguments: str) -> str:
    asked = text_asked_for(arguments, program="python -m elastictrain.run", purpose="Trains.")
    assert asked is not None
    return asked


def test_nothing_is_asked_for() -> None:
    assert text_asked_for(["recipe=llama_tiny"], program="x", purpose="") is None


def test_help_names_every_key_recipe_and_choice() -> None:
    shown = text("--help")
    assert shown.startswith("Trains.\n\nUsage: python -m elastictrain.run recipe=NAME")
    for key in all_keys():
        assert f"  {key}  (" in shown
    assert "  llama_tiny    A tiny Llama" in shown
    assert "ddp, fsdp, hsdp" in shown


def test_help_on_a_topic() -> None:
    assert text("--help", "optim.lr") == "  optim.lr  (a number > 0; default 0.0003)\n      Peak learning rate."
    assert "Choices of parallel:\n  ddp           A whole copy" in text("--help", "parallel")
    with pytest.raises(UsageError, match="did you mean checkpoint"):
        text("--help", "chekpoint")


def test_help_with_a_recipe_lists_the_keys_of_its_task() -> None:
    shown = text("--help", "model", "recipe=digits_ddp")
    assert "  model.hidden  (a whole number >= 1; default 128)" in shown


def test_show_prints_the_resolved_configuration() -> None:
    shown = text("recipe=digits_ddp", "train.steps=70", "--cfg", "job")
    assert "steps: 70" in shown
    assert "kind: ddp" in shown
