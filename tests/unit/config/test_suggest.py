"""What was probably meant."""

import pytest

from elastictrain.config.validate import suggest_choice, suggest_key

VOCABULARY = ("run.dir", "checkpoint.dir", "run.seed", "train.steps", "train.seq_len", "optim.lr", "checkpoint.every_steps")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.stepss", "train.steps"),
        ("train.lr", ""),
        ("seed", "run.seed"),
        ("dir", ""),
        ("trian.steps", "train.steps"),
        ("Train.steps", "train.steps"),
        ("train.every_steps", "train.steps"),
        ("optim.seed_", ""),
        ("train.l", ""),
        ("nothing.like", ""),
    ],
)
def test_suggest_key(wrong: str, meant: str) -> None:
    assert suggest_key(wrong, vocabulary=VOCABULARY) == meant


def test_suggest_choice() -> None:
    assert suggest_choice("fspd", choices=["ddp", "fsdp"]) == "; did you mean fsdp?"
    assert suggest_choice("xyz", choices=["ddp", "fsdp"]) == ""
