"""hvd.track() with the real wandb and MLflow, and transformers' Trainer: packages of the extra `integrations`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hvdrun_job import HVDRUN, environment
from test_torch_scripts import SCRIPTS, TIMEOUT_S, read_reports

from hvdkit.errors import TrackError
from hvdkit.tracking.targets import Targets, open_writers

pytestmark = pytest.mark.integrations

ROWS = [(step, {"loss": 1.0 / (step + 1), "accuracy": 0.5, "hvdkit/step_ms": 2.0}) for step in range(3)]
ROWS[1][1]["loss"] = float("nan")


@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file:{}/runs"])
def test_mlflow_has_what_was_written(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = store.format(tmp_path)
    (writer,) = open_writers(
        Targets(mlflow={"uri": uri, "experiment": "digits", "run_name": "one", "tags": {"a": "b"}})
    )
    writer.write(ROWS)
    writer.close("FINISHED")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "one" and run.data.tags["a"] == "b"
    history = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "accuracy")]
    assert sorted(history) == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert run.data.metrics["hvdkit/step_ms"] == 2.0 and run.data.metrics["loss"] == pytest.approx(1 / 3)
    (again,) = open_writers(Targets(mlflow={"uri": uri, "run_id": run.info.run_id}))
    assert client.get_run(run.info.run_id).info.status == "RUNNING" and again.resume == {"run_id": run.info.run_id}
    again.write([(3, {"accuracy": 1.0})])
    again.close("KILLED")
    assert client.get_run(run.info.run_id).info.status == "KILLED"
    assert len(client.get_metric_history(run.info.run_id, "accuracy")) == 4
    with pytest.raises(TrackError, match="mlflow has the option 'name'"):
        open_writers(Targets(mlflow={"uri": uri, "name": "x"}))


def test_wandb_has_what_was_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    (writer,) = open_writers(Targets(wandb={"project": "digits", "mode": "offline", "dir": str(tmp_path)}))
    writer.write(ROWS)
    run = writer._run  # type: ignore[attr-defined]
    deadline = time.monotonic() + TIMEOUT_S
    while "accuracy" not in (summary := dict(run.summary)) and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of wandb's own makes it
    assert writer.resume == {"id": run.id, "resume": "allow"}
    writer.close("FAILED")
    assert summary["accuracy"] == 0.5 and summary["hvdkit/step_ms"] == 2.0
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"hvdkit/step_ms" in file.read_bytes()


def run_trainer(tmp_path: Path, ranks: int, *options: str) -> list[dict[str, object]]:
    command = [*HVDRUN, "-np", str(ranks), *options, sys.executable, str(SCRIPTS / "hugging_face.py"), str(tmp_path)]
    environ = {**environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_reports(done.stdout)


@pytest.mark.ranks
def test_transformers_trainer_runs_under_hvdrun_and_trains_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (alone,) = run_trainer(tmp_path, 1)
    by_gloo, by_hvdkit = run_trainer(tmp_path, 2), run_trainer(tmp_path, 2, "--mpi-backend")
    for ranks, backend in ((by_gloo, "gloo"), (by_hvdkit, "hvdkit")):
        assert [(each["rank"], each["size"], each["backend"]) for each in ranks] == [(0, 2, backend), (1, 2, backend)]
        for each in ranks:
            assert each["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-5)
            assert each["weights"] == ranks[0]["weights"]
