"""MLflow."""

import os

from elastictrain.config.constraints import flatten
from elastictrain.telemetry.loggers import LoggedRun, MetricPoint

_TAG = "elastictrain.run_id"
_MOST_PARAMS = 100  # in one request
_LONGEST_PARAM = 500


class MlflowLogger:
    """One MLflow run for the whole run. `tracking_uri`: null for MLFLOW_TRACKING_URI, or MLflow's default."""

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "elastictrain", name: str | None = None) -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._name = name

    def open(self, run: LoggedRun) -> None:
        """Continue MLflow's run that has this run's id as a tag, or create it; only then parameters are sent."""
        # Its messages go through this process's logging, which does not tear the progress bar.
        os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = client = MlflowClient(tracking_uri=self._tracking_uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        own_id = run.read_id()
        earlier = client.search_runs([experiment_id], filter_string=f"tags.`{_TAG}` = '{own_id}'", max_results=1)
        if earlier:
            self._run_id: str = earlier[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            created = client.create_run(experiment_id, tags={_TAG: own_id}, run_name=self._name or run.name)
            self._run_id = created.info.run_id
            params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in flatten(run.config)]
            for first in range(0, len(params), _MOST_PARAMS):
                client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
        # A parameter cannot change, a tag can.
        tags = {"elastictrain.world_size": str(run.world_size), "elastictrain.generation": run.generation}
        client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log(self, point: MetricPoint) -> None:
        from mlflow.entities import Metric

        milliseconds = int(point.time * 1000)
        metrics = [Metric(key, value, milliseconds, point.step) for key, value in point.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, complete: bool) -> None:
        # A run that is to be continued stays RUNNING.
        if complete:
            self._client.set_terminated(self._run_id)
