"""What is printed instead of training."""

import pytest

from elastictrain.config.help import requested_help
from elastictrain.config.schema import all_keys
from elastictrain.errors import ConfigError, UsageError


def text(*arguments: str) -> str:
    asked = requested_help(arguments, program="python -m elastictrain.run", purpose="Trains.")
    assert asked is not None
    return asked


def test_nothing_is_asked_for() -> None:
    assert requested_help(["recipe=llama_tiny"], program="x", purpose="") is None


def test_help_names_every_key_recipe_and_choice() -> None:
    shown = text("--help")
    assert shown.split()[:5] == ["Trains.", "Usage:", "python", "-m", "elastictrain.run"]
    for key in all_keys():
        assert f"  {key}  (" in shown
    words = shown.split()
    assert words[words.index("llama_tiny") + 1 :][:3] == ["A", "tiny", "Llama"]
    assert words[words.index("parallel") + 1 :][:3] == ["ddp,", "fsdp,", "hsdp"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("--help", "optim.lr"), "  optim.lr  (a number > 0; default 0.0003)\n      Peak learning rate."),
        (("--help", "parallel"), "Choices of parallel:\n  ddp           A whole copy"),
        (("--help", "model", "recipe=digits_ddp"), "  model.hidden  (a whole number >= 1; default 128)"),
    ],
)
def test_help_on_a_topic(arguments: tuple[str, ...], shown: str) -> None:
    """With a recipe also on the keys of its task."""
    assert shown in text(*arguments)


def test_a_topic_that_there_is_not_suggests_another() -> None:
    with pytest.raises(UsageError, match=r"checkpoint\?"):
        text("--help", "chekpoint")


@pytest.mark.parametrize("wrong", ["recipe=llama_tin", "parallel=nosuch"])
def test_help_on_a_choice_that_there_is_not_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError) as raised:
        text("--help", wrong)
    assert [problem.key for problem in raised.value.problems] == [wrong.partition("=")[0]]


def test_show_prints_the_resolved_configuration() -> None:
    shown = text("recipe=digits_ddp", "train.steps=70", "--cfg", "job")
    assert "steps: 70" in shown
    assert "kind: ddp" in shown


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, text("--help").splitlines())) <= columns
