"""Runs that log to the real W&B (offline) and MLflow (SQLite): one run of each across kills and worlds."""

import os
import struct
import sys
from pathlib import Path

import psutil
import pytest
from torchruns import TINY, alone, events, kill, last_step, losses, started, torchrun, train, wait_until

pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

# MLflow and SQLAlchemy deprecate what the other one uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = 30
ARGUMENTS = (
    *TINY,
    f"train.steps={STEPS}",
    "train.eval_every_steps=0",
    "checkpoint.every_steps=5",
    "fault.heartbeat_s=0.2",
    "telemetry.log_every_steps=1",
)
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
# What MLflow imports takes it longer than a busy machine has at the end of so short a run (`fault.close_s`).
IMPORTED = {"AHEAD": "mlflow.tracking.client mlflow.store.tracking.sqlalchemy_store"}


def wandb_records(folder: Path) -> list[object]:
    """The records in a file of W&B: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, at, part, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(part))
            part = b""
    return records


def wandb_steps(folder: Path) -> dict[int, float]:
    found = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":  # type: ignore[attr-defined]
            items = {"".join(one.nested_key) or one.key: one.value_json for one in record.history.item}  # type: ignore[attr-defined]
            found[int(items["step"])] = float(items["loss/train"])
    return found


def test_one_run_of_each_goes_on_after_a_kill_and_in_another_world(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri, run_dir = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    client = MlflowClient(tracking_uri=uri)
    # MLflow makes the tables of a new database, which takes it seconds.
    client.search_experiments()
    loggers = f"telemetry.loggers=[wandb,{{_target_: mlflow, tracking_uri: '{uri}'}}]"
    arguments = [*ARGUMENTS, f"run.dir={run_dir}", loggers, "fault.shutdown_grace_s=29"]
    with torchrun(arguments, world_size=1, folder=tmp_path, extra_environment=OFFLINE | IMPORTED) as run:
        # Both are slow to start; a kill before says nothing.
        wait_until(lambda: len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1, what="W&B's file")
        wait_until(lambda: last_step(run_dir) >= 10, what="step 10")
        for worker in run.workers():
            kill(worker)
        run.wait()
    train(arguments, world_size=2, folder=tmp_path, extra_environment=OFFLINE | IMPORTED)
    # The later line counts: steps that another world repeats agree to rounding.
    expected = {row["step"]: row["loss"] for row in events(run_dir, "step")}
    (run_id,) = {folder.name.rpartition("-")[2] for folder in run_dir.glob("wandb/offline-run-*")}
    assert (run_dir / "telemetry" / "run_id").read_text() == run_id
    folders = sorted(run_dir.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    logged = wandb_steps(folders[0]) | wandb_steps(folders[1])
    assert logged == {step: pytest.approx(expected[step], rel=1e-3) for step in logged}
    assert set(range(max(wandb_steps(folders[1])), STEPS + 1)) <= logged.keys()
    (experiment,) = [one for one in client.search_experiments() if one.name == "elastictrain"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.tags["elastictrain.world_size"]) == ("FINISHED", "2")
    assert found.data.params["train.steps"] == str(STEPS)
    history = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "loss/train")}
    assert history == {step: pytest.approx(expected[step], rel=1e-3) for step in history}
    assert STEPS in history
    totals = {name: client.get_metric_history(found.info.run_id, f"run/{name}")[-1].value for name in ("restarts", "goodput")}
    assert totals["restarts"] == len({row["incarnation"] for row in events(run_dir, "start")}) - 1
    assert 0 < totals["goodput"] < 1


def test_a_logger_that_cannot_write_changes_nothing(tmp_path: Path) -> None:
    """A folder that is missing, nobody who answers: the run is the same, and says once what is lost."""
    code, _ = alone([*ARGUMENTS, f"run.dir={tmp_path}/plain"], folder=tmp_path)
    assert code == 0
    nobody = "{_target_: mlflow, tracking_uri: 'http://127.0.0.1:9'}"
    loggers = f"telemetry.loggers=[{nobody},{{_target_: prometheus, path: {tmp_path}/no/a.prom}}]"
    code, output = alone([*ARGUMENTS, f"run.dir={tmp_path}/full", loggers], folder=tmp_path, extra_environment=OFFLINE)
    assert code == 0, output
    assert losses(tmp_path / "full") == losses(tmp_path / "plain")
    assert output.count("prometheus fails") == output.count(f"prometheus lacks {STEPS} points") == 1
    assert output.count(f"mlflow lacks {STEPS} points") == 1


def test_nothing_is_imported_by_a_run_that_does_not_ask(tmp_path: Path) -> None:
    # Each would fail if it were imported.
    for name in ("wandb", "mlflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('FORBIDDEN')")
    arguments = [*ARGUMENTS, "train.steps=3", f"run.dir={tmp_path}/run", "telemetry.loggers=[tensorboard]"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code, output = alone(arguments, folder=tmp_path, extra_environment={"PYTHONPATH": path}, warm=False)
    assert code == 0, output
    assert "FORBIDDEN" not in output


def test_a_missing_package_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    # A folder without a module hides nothing: only the name is there.
    program = "import sys; sys.modules['wandb'] = None; from elastictrain.run import main; sys.exit(main(sys.argv[1:]))"
    arguments = [*ARGUMENTS, f"run.dir={tmp_path}/run", "telemetry.loggers=[wandb]"]
    with started([sys.executable, "-c", program, *arguments], log=tmp_path / "log.txt", warm=False) as run:
        assert run.wait(60) == 78
        assert "pip install wandb" in run.output()
    assert not (tmp_path / "run" / "events").exists()


@pytest.fixture(autouse=True)
def nothing_stays() -> None:
    """W&B's own process ends with the run, however that ends."""
    yield
    wait_until(
        lambda: not any("wandb-core" in one.name() for one in psutil.Process().children(recursive=True)),
        timeout_s=30,
        what="end of wandb-core",
    )
