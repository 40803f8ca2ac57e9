"""A mixture of packed sources with a change of weights: killed, and on another world, it stays the same run."""

import json
from collections import Counter
from pathlib import Path

import pytest
from torchruns import TINY, events, kill, last_step, last_wins, losses, torchrun, train_warm, wait_until

from elastictrain.config.load import load
from elastictrain.data.__main__ import main
from elastictrain.data.ledger import check_exactly_once, fold, read_ledger
from elastictrain.data.opening import open_datasets
from elastictrain.storage.opening import open_store

STEPS = 24
BATCH = 8


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sources")
    for name, text in (("one", "def f(x): return x\n"), ("two", "to be or not\n")):
        lines = (json.dumps({"text": text * (1 + number % 9)}) + "\n" for number in range(200))
        (folder / f"{name}.jsonl").write_text("".join(lines))
        assert main(["prepare", str(folder / f"{name}.jsonl"), "--out", str(folder / name)]) == 0
    sources = f"{{path:{folder}/one,weight:[[0,3],[12,1]]}},{{path:{folder}/two,weight:1}}"
    return [
        *TINY,
        "data=mixture",
        f"data.sources=[{sources}]",
        "data.packing=true",
        "data.ledger=true",
        "data.holdout_samples=0",
        f"train.global_batch={BATCH}",
        f"train.steps={STEPS}",
        "train.eval_every_steps=0",
        "checkpoint.every_steps=5",
        "fault.heartbeat_s=0.2",
    ]


@pytest.fixture(scope="module")
def undisturbed(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_warm(arguments, world_size=2, folder=tmp_path_factory.mktemp("undisturbed"))


def test_samples_have_the_weights_exactly_once(arguments: list[str], undisturbed: Path) -> None:
    config = load(last_wins([*arguments, "run.dir=unused"]))
    data = open_datasets(config.data, seq_len=config.train.seq_len, global_batch=BATCH)
    assert data.mixture is not None
    rows = list(read_ledger(open_store(str(undisturbed))))
    problems = check_exactly_once(
        rows, steps=STEPS, global_batch=BATCH, num_samples=len(data.train), seed=0, shuffle=True, mixture=data.mixture
    )
    assert problems == ()
    drawn = {
        step: Counter(sample >= data.mixture.sizes[0] for sample in samples.values()) for step, samples in fold(rows).items()
    }
    assert all(drawn[step] == {False: 6, True: 2} for step in range(1, 13))
    assert all(drawn[step] == {False: 4, True: 4} for step in range(13, STEPS + 1))


def test_killed_it_repeats_bit_for_bit(arguments: list[str], undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with torchrun([*arguments, f"run.dir={run_dir}"], world_size=2, folder=tmp_path, max_restarts=1) as run:
        wait_until(lambda: last_step(run_dir) >= 7, what="step 7")
        kill(run.workers()[1])
        assert run.wait() == 0, run.output()[-5000:]
    assert len(events(run_dir, "start")) == 2
    assert losses(run_dir) == losses(undisturbed)


def test_another_world_trains_on_the_same(arguments: list[str], undisturbed: Path, tmp_path: Path) -> None:
    other = train_warm([*arguments, "parallel=fsdp"], world_size=3, folder=tmp_path)
    assert losses(other) == pytest.approx(losses(undisturbed), rel=1e-4)
    assert fold(list(read_ledger(open_store(str(other))))) == fold(list(read_ledger(open_store(str(undisturbed)))))
