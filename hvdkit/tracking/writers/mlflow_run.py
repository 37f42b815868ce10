"""A run of MLflow, on a server, in a folder or in a database."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.errors import TrackError
from hvdkit.optional_import import optional_import
from hvdkit.tracking.rows import Averages
from hvdkit.tracking.writer import End

_MOST_IN_A_CALL = 1000  # limit of MLflow's log_batch
_OPTIONS = {"uri", "experiment", "run_name", "run_id", "tags"}


class MlflowRun:
    """A Writer. mlflow: the tracking URI, or a mapping of uri, experiment, run_name, run_id (to continue one) and tags.

    It does not use a run that mlflow.start_run() has opened in this process. Raises MissingDependencyError, TrackError
    for another option, and what MLflow raises.
    """

    name = "mlflow"

    def __init__(self, mlflow: str | Mapping[str, Any]) -> None:
        options = {"uri": mlflow} if isinstance(mlflow, str) else dict(mlflow)
        if unknown := sorted(options.keys() - _OPTIONS):
            raise TrackError(f"mlflow has the option {unknown[0]!r}. It may have {', '.join(sorted(_OPTIONS))}.")
        module = optional_import("mlflow", "mlflow")
        self._metric, self._client = module.entities.Metric, module.MlflowClient(options.get("uri"))
        if run_id := options.get("run_id"):
            self._run: str = self._client.get_run(run_id).info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            name = options.get("experiment", "Default")
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
            run = self._client.create_run(experiment, run_name=options.get("run_name"), tags=options.get("tags"))
            self._run = run.info.run_id
        self.resume: Mapping[str, str] = {"run_id": self._run}

    def write(self, rows: Sequence[Averages]) -> None:
        now = int(1e3 * time.time())
        metrics = [self._metric(key, value, now, step) for step, values in rows for key, value in values.items()]
        for first in range(0, len(metrics), _MOST_IN_A_CALL):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_IN_A_CALL])

    def close(self, end: End | None) -> None:
        if end is not None:
            self._client.set_terminated(self._run, end)
