import sys
from pathlib import Path

import pytest
import torch
import yaml

from elastictrain.errors import ConfigError
from elastictrain.train.task import BringsDatasets, ShowsSample
from recipes.digits.data import eval_indices, train_indices
from recipes.digits.task import DigitsTask, MlpConfig

CONF = Path(__file__).parents[3] / "conf" / "model" / "mlp.yaml"


@pytest.mark.parametrize("length", [0, 5, 6, 7, 1797])
def test_split_covers_everything_once(length: int) -> None:
    held_out, trained = eval_indices(length), train_indices(length)
    assert sorted(held_out + trained) == list(range(length))
    assert len(held_out) == length // 6


def test_datasets_are_the_bundled_images() -> None:
    pytest.importorskip("sklearn")
    task = DigitsTask(model=MlpConfig())
    assert isinstance(task, BringsDatasets)
    assert isinstance(task, ShowsSample)
    train, held_out = task.train_dataset(), task.eval_dataset()
    assert (len(train), len(held_out)) == (1498, 299)
    sample = train[0]
    assert sample["image"].shape == (64,)
    assert (sample["image"].dtype, sample["label"].dtype) == (torch.float32, torch.int64)
    assert 0.0 <= float(train.images.min()) < float(train.images.max()) == 1.0
    counts = torch.bincount(held_out.labels)
    assert len(counts) == 10
    assert counts.min() >= 25
    # Index 5 of the whole set is the first that is held out, 6 the sixth that is trained on.
    assert (int(held_out.labels[0]), int(train.labels[5])) == (5, 6)


def test_loss_is_a_sum_with_its_count_and_dropout_is_real() -> None:
    task = DigitsTask(model=MlpConfig(**yaml.safe_load(CONF.read_text())))
    torch.manual_seed(0)
    model = task.build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 26_122
    batch = {"image": torch.rand(20, 64), "label": torch.arange(20) % 10}
    assert task.loss(model, batch).loss_sum != task.loss(model, batch).loss_sum
    model.eval()
    output = task.loss(model, batch)
    expected = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
    torch.testing.assert_close(output.loss_sum / output.weight, expected)
    assert output.weight.item() == 20


def test_no_hidden_layer_is_logistic_regression() -> None:
    model = DigitsTask(model=MlpConfig(num_hidden=0)).build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 650


def test_it_learns_and_says_so() -> None:
    pytest.importorskip("sklearn")
    task = DigitsTask(model=MlpConfig())
    torch.manual_seed(0)
    model = task.build_model()
    train = task.train_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        chosen = torch.arange(step * 64, step * 64 + 64) % len(train)
        output = task.loss(model, {"image": train.images[chosen], "label": train.labels[chosen]})
        (output.loss_sum / output.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    text = task.show_sample(model, device=torch.device("cpu"), seed=0)
    assert int(text.split()[0]) > 260
    assert text.split(" ", 1)[1].startswith("of 299 held-out digits recognised (")
    assert model.training


def test_what_is_shown_does_not_depend_on_dropout() -> None:
    pytest.importorskip("sklearn")
    task = DigitsTask(model=MlpConfig(dropout=0.9))
    torch.manual_seed(0)
    model = task.build_model()
    texts = {task.show_sample(model, device=torch.device("cpu"), seed=0) for _ in range(5)}
    assert len(texts) == 1


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        DigitsTask(model=MlpConfig()).train_dataset()
