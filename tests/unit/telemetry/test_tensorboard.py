from pathlib import Path
from uuid import uuid4

import pytest

from elastictrain.errors import StorageError
from elastictrain.storage import appendlog
from elastictrain.storage.opening import open_store
from elastictrain.storage.store import Store
from elastictrain.telemetry.loggers import MetricPoint
from elastictrain.telemetry.tensorboard import TensorBoardLogger
from tests.unit.telemetry.runs import run_of


class Writer:
    """A logger at a fixed time."""

    def __init__(self, store: Store, *, first_step: int = 1, now: float = 1_700_000_000.0) -> None:
        self._logger = TensorBoardLogger()
        self._logger.open(run_of(store, first_step=first_step))
        self._now = now

    def write(self, step: int, value: float) -> None:
        self._logger.log(MetricPoint(step, self._now, {"loss/train": value}))

    def close(self) -> None:
        self._logger.close(complete=True)


def read_scalar(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The curve that TensorBoard itself would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = EventAccumulator(str(folder))
    curve.Reload()
    return [(point.step, point.value) for point in curve.Scalars(tag)]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_tensorboard_reads_what_is_written_at_once(tmp_path: Path, scheme: str) -> None:
    writer = Writer(open_store(f"{scheme}{tmp_path}"))
    for step in (10, 20):
        writer.write(step, 1.0 / step)
    assert read_scalar(tmp_path / "tensorboard", "loss/train") == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    writer.close()


def test_a_resume_makes_tensorboard_forget_the_steps_that_were_lost(tmp_path: Path) -> None:
    wall_time = 1_700_000_000.0
    for purge_step, steps, value in ((1, (1, 2, 3, 4), 1.0), (3, (3,), 2.0)):
        wall_time += 60.0
        writer = Writer(open_store(str(tmp_path)), first_step=purge_step, now=wall_time)
        for step in steps:
            writer.write(step, value)
        writer.close()
    assert read_scalar(tmp_path / "tensorboard", "loss/train") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_texts_tell_each_start_and_hparams_the_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
    from tensorboard.util.tensor_util import make_ndarray

    found = []
    for now, first_step in ((1.0, 1), (2.0, 21)):
        writer = Writer(open_store(str(tmp_path)), first_step=first_step, now=now)
        writer.write(first_step, 1.0)
        writer.close()
        curve = EventAccumulator(str(max((tmp_path / "tensorboard").iterdir())))
        curve.Reload()
        texts = {
            tag: [(one.step, make_ndarray(one.tensor_proto).item().decode()) for one in curve.Tensors(tag)]
            for tag in curve.PluginTagToContent("text")
        }
        assert texts["run/start"] == [(first_step, f"000001-abcdef01 begins with step {first_step}, with 1 worker")]
        assert texts["run/configuration"] == [(first_step, "    run.seed=1\n    train.steps=100\n")]
        try:
            found += curve.PluginTagToContent("hparams").values()
        except KeyError:
            assert first_step > 1
    (hparams,) = map(parse_session_start_info_plugin_data, found)
    assert {name: value.number_value for name, value in hparams.hparams.items()} == {"run.seed": 1.0, "train.steps": 100.0}


def test_parts_on_an_object_store_are_read_as_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appendlog, "SEGMENT_BYTES", 200)
    store = open_store(f"memory://{uuid4().hex}")
    for now, first in ((1.0, 1), (2.0, 21)):
        writer = Writer(store, first_step=first, now=now)
        for step in range(first, first + 30):
            writer.write(step, now)
        writer.close()
    keys = [info.key for info in store.list("tensorboard")]
    assert len(keys) > 6
    for key in keys:
        (tmp_path / Path(key).name).write_bytes(store.read(key))
    expected = [(step, 1.0) for step in range(1, 21)] + [(step, 2.0) for step in range(21, 51)]
    assert read_scalar(tmp_path, "loss/train") == expected


def test_file_names_sort_by_time(tmp_path: Path) -> None:
    for now in (1_000_000_000.0, 999_999_999.0):
        writer = Writer(open_store(str(tmp_path)), now=now)
        writer.write(1, 1.0)
        writer.close()
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert [name.split(".")[3] for name in names] == ["0999999999", "1000000000"]


def test_a_folder_that_takes_no_file_raises_and_stays(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    writer = Writer(open_store(str(tmp_path)))
    with pytest.raises(StorageError):
        writer.write(1, 1.0)
    writer.close()
    assert (tmp_path / "tensorboard").read_text() == "no folder"
