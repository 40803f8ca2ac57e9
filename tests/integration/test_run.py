"""Mistakes that the command line alone shows: said at once, all of them, before anything is touched."""

import os
from pathlib import Path

import pytest

from elastictrain.run import main

TINY = "recipe=llama_tiny"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([TINY, "train.lr=1"], 78, ["`train.lr` is not a key; `train` has steps, global_batch, "]),
        ([TINY, "train.micro_bath=1"], 78, ["`train.micro_bath` is not a key; did you mean `train.micro_batch`?"]),
        ([TINY, "train.steps=many"], 78, ['`train.steps` must be a whole number >= 1, but is "many"']),
        ([TINY, "train.global_batch=0"], 78, ["`train.global_batch` must be a whole number >= 1, but is 0"]),
        (
            [TINY, "train.stepz=3", "optim.warmup_steps=abc", "train.global_batch=0", "parallel.kind=dpp"],
            78,
            ["4 problems", "`train.stepz`", "`optim.warmup_steps`", "`train.global_batch`", "`parallel.kind`"],
        ),
        (["recipe=lama_tiny"], 78, ["`recipe` must be one of", "did you mean llama_tiny?"]),
        (["llama_tiny"], 64, ["`llama_tiny` must be KEY=VALUE; did you mean recipe=llama_tiny?"]),
        ([], 78, ["`recipe` is not chosen: choose one of digits_ddp", "`run.dir` must be given"]),
        ([TINY, "parallel=dpp"], 78, ["`parallel` must be one of ddp, fsdp, hsdp", 'but is "dpp"']),
        ([TINY, "train.micro_batch=64"], 78, ["`train.micro_batch` must be <= `train.global_batch` = 16, but is 64"]),
        ([TINY, "parallel.shard_size=2"], 78, ["`parallel.shard_size` is 2, but has no effect with parallel=ddp"]),
        ([TINY, "fault.step_timeout_s=1e9"], 78, ["`fault."]),
        ([TINY, "task._target_=nowhere.Task"], 78, ["`task._target_`", "there is no module nowhere"]),
        ([TINY, "task._target_=collections.Nothing"], 78, ["`task._target_`", "collections", "Nothing"]),
        ([TINY, "task._target_=collections.OrderedDict"], 78, ["collections.OrderedDict lacks build_model, loss"]),
        ([TINY, "model.widht=3"], 78, ["`model.widht` is not a key"]),
        ([TINY, "run.dir="], 78, ["`run.dir`"]),
        ([TINY, "train.steps"], 64, ["`train.steps` must be KEY=VALUE"]),
        ([TINY, "train.steps", "3"], 64, ["`train.steps` must be KEY=VALUE; `3` must be KEY=VALUE"]),
        ([TINY, ""], 64, ["`` must be KEY=VALUE"]),
        ([TINY, "train.steps =3"], 64, ["KEY is words joined by dots"]),
        ([TINY, "train.steps==3"], 64, ["if the value is text, write it in quotes"]),
        ([TINY, f"train.steps={'9' * 5000}"], 64, ["cannot be read (Exceeds the limit"]),
        ([TINY, f"train.steps={'[' * 3000}"], 64, ["cannot be read"]),
        ([TINY, f"train.steps={2**63}"], 78, ["the largest whole number is 9223372036854775807"]),
        ([TINY, "train.steps=3", "train.steps=4"], 64, ["given twice: train.steps=3 and train.steps=4"]),
        ([TINY, "+train.steps=3", "++train.steps=3"], 64, ["given twice: +train.steps=3 and ++train.steps=3"]),
        ([TINY, "~train.clip_norm", "train.clip_norm=2"], 64, ["given twice: ~train.clip_norm and train.clip_norm=2"]),
        ([TINY, "recipe=digits_ddp"], 64, ["given twice: recipe=llama_tiny and recipe=digits_ddp"]),
        ([TINY, "parallel=ddp", "parallel=fsdp"], 64, ["given twice: parallel=ddp and parallel=fsdp"]),
        ([TINY, "train.steps=1,2"], 64, ["must be one value"]),
        ([TINY, "train.steps=choice(1,2)"], 64, ["must be one value"]),
        ([TINY, "--multirun"], 64, ["--multirun is not offered"]),
        ([TINY, "-m", "train.steps=1,2"], 64, ["-m is not offered"]),
        ([TINY, "--config-name=mine"], 64, ["--config-dir DIR"]),
        ([TINY, "hydra.run.dir=x"], 64, ["--config-dir DIR"]),
        ([TINY, "hydra/launcher=basic"], 64, ["--config-dir DIR"]),
        ([TINY, "+train.nosuch=3"], 78, ["`train.nosuch` is not a key"]),
        ([TINY, "~train.nosuch"], 78, ["`train.nosuch` cannot be deleted"]),
        ([TINY, "~train.steps"], 78, ["`train.steps` must be given"]),
        ([TINY, "train.steps="], 78, ["`train.steps` must be a whole number >= 1, but is"]),
        (["RECIPE=llama_tiny"], 78, ["did you mean `recipe`?"]),
        ([TINY, "--config-dir=/nowhere"], 64, ["/nowhere"]),
        ([TINY, "--steps=5"], 64, ["unknown option --steps=5", "keys are given without dashes, steps=5"]),
        (["--hepl"], 64, ["unknown option --hepl; did you mean --help?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_one_message_with_the_key_what_must_be_and_what_is(
    arguments: list[str], code: int, says: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("elastictrain: ")
    assert captured.err.count("elastictrain: ") == 1
    for text in says:
        assert text in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_nothing_reads_names_the_keys_of_its_group_once(capsys: pytest.CaptureFixture[str]) -> None:
    main([TINY, "train.nosuch=1", "task.zzz=1"])
    for line in capsys.readouterr().err.splitlines()[1:]:
        names = line.partition(" has ")[2].split(", ")
        assert len(names) > 4
        assert len(names) == len(set(names))


@pytest.mark.parametrize("arguments", [["++train.steps=3"], ["+train.steps=3"], ["~train.clip_norm"], ["run.dir='a, b'"]])
def test_what_hydra_understands_and_we_offer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TINY, *arguments, "--cfg", "job"]) == 0, capsys.readouterr().err


def test_half_an_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([TINY]) == 78
    assert "`RANK`" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--help", "train"], [TINY, "--cfg", "job"]])
def test_questions_are_answered_and_nothing_is_done(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = dict(os.environ)
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "steps" in captured.out
    assert captured.err == ""
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before
