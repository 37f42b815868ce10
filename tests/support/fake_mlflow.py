"""An MLflow whose runs are lines of the file FAKE_MLFLOW. `install()` puts it in MLflow's place."""

from __future__ import annotations

import os
import sys
import types
import uuid
from typing import Any


class Client:
    """What hvdkit/tracking/writers/mlflow_run.py calls of mlflow.MlflowClient."""

    def __init__(self, uri: str | None) -> None:
        self._uri = uri

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="0")

    def create_run(self, experiment: str, run_name: str | None, tags: Any) -> Any:
        return self._tell("created", uuid.uuid4().hex)

    def get_run(self, run: str) -> Any:
        return self._tell("continued", run)

    def update_run(self, run: str, status: str) -> None:
        self._tell(status, run)

    def log_batch(self, run: str, metrics: Any) -> None:
        pass

    def set_terminated(self, run: str, status: str) -> None:
        self._tell(status, run)

    def _tell(self, what: str, run: str) -> Any:
        with open(os.environ["FAKE_MLFLOW"], "a") as file:
            file.write(f"{what} {run}\n")
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run))


def install() -> None:
    module = types.ModuleType("mlflow")
    vars(module).update(MlflowClient=Client, entities=types.SimpleNamespace(Metric=lambda *values: values))
    sys.modules["mlflow"] = module
