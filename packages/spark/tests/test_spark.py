"""hvdkit on a real Spark with two executors, on this machine."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spark_functions
import torch
from hvdrun_job import alive, wait_until
from refused import refused
from spark_session import HERE, PATH, ROOT, SUPPORT, local_spark

from hvdkit.errors import ConfigError, HorovodInternalError, LaunchTimeoutError

pytestmark = [pytest.mark.integrations, pytest.mark.ranks]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with local_spark() as session:
        yield session


def test_a_function_runs_on_ranks_and_leaves_nothing(spark: Any) -> None:
    import hvdkit_spark

    lines = io.StringIO()
    env = {"SPARK_TEST": "as it is"}
    found = hvdkit_spark.run(spark_functions.describe, (10,), num_proc=2, env=env, stdout=lines)
    assert sorted(lines.getvalue().splitlines()) == [f"[{rank}] the first words of rank {rank}" for rank in range(2)]
    assert [(each["rank"], each["size"], each["local_rank"]) for each in found] == [(0, 2, 0), (1, 2, 1)]
    assert {each["total"] for each in found} == {21.0}
    assert {each["variable"] for each in found} == {"as it is"}
    assert [each["horovod"] for each in found] == [
        {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": socket.gethostname(),
        }
        for rank in range(2)
    ]
    assert all("shared_memory transport" in each["transport"] for each in found), found
    assert not any(alive(each["process"]) for each in found)


@pytest.mark.parametrize(
    ("fails", "kind", "text"),
    [
        ("raise", ValueError, "does not like it"),
        ("die", HorovodInternalError, "Rank 1 .*SIGKILL.*last words"),
    ],
)
def test_the_cause_is_raised_while_another_rank_computes(spark: Any, fails: str, kind: type, text: str) -> None:
    import hvdkit_spark

    with pytest.raises(kind, match=re.compile(text, re.DOTALL)) as raised:
        hvdkit_spark.run(spark_functions.describe, (0,), {"fails": fails}, num_proc=2)
    if fails == "raise":
        assert "on rank 1 on" in str(raised.value.__cause__) and "spark_functions.py" in str(raised.value.__cause__)


def test_ranks_that_find_no_room_are_refused(spark: Any) -> None:
    import hvdkit_spark

    with refused("spark-number-invalid", names=["num_proc is 0"]):
        hvdkit_spark.run(spark_functions.describe, (0,), num_proc=0)
    with refused("spark-no-room", names=["3 ranks", "3 tasks", "room for 2 "], kind=LaunchTimeoutError):
        hvdkit_spark.run(spark_functions.describe, (0,), num_proc=3, start_timeout=0)


def test_a_killed_executor_ends_run_and_restarts_run_elastic(spark: Any, tmp_path: Path) -> None:
    import hvdkit_spark

    arguments: dict[str, Any] = {"fn": spark_functions.count_steps, "args": (6, 3, str(tmp_path)), "num_proc": 2}
    with pytest.raises(HorovodInternalError, match=r"lost a task of the job.*executor \d+ exited"):
        hvdkit_spark.run(**arguments)
    commits = str(tmp_path / "commits")
    env = {"HVDKIT_ELASTIC_SAVE_S": "0"}
    first, second = hvdkit_spark.run_elastic(**arguments, env=env, checkpoints=commits, min_num_proc=2)
    steps, of_this_start, ranks = first
    assert first == second and (steps, ranks) == (6, 2) and 3 <= of_this_start < 6, "it goes on from a commit"
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(started) == 6
    assert wait_until(lambda: not any(map(alive, started)))


def write_rows(folder: Path, features: Any, labels: Any) -> None:
    """Three files with row groups of unequal sizes."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True)
    for number, (start, stop) in enumerate([(0, 5), (5, 17), (17, len(labels))]):
        table = pyarrow.table({"x": list(features[start:stop]), "y": labels[start:stop]})
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=4)


def test_an_estimator_trains_as_one_process_with_the_whole_batch(spark: Any, tmp_path: Path) -> None:
    from hvdkit_spark.common.store import Store
    from hvdkit_spark.torch import TorchEstimator

    generator = np.random.default_rng(0)
    features = generator.normal(size=(24, 3)).astype(np.float32)
    labels = (features @ [1.0, -2.0, 0.5]).astype(np.float32)
    write_rows(tmp_path / "intermediate_train_data.mine", features, labels)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        store=Store.create(str(tmp_path)),
        num_proc=2,
        batch_size=4,
        epochs=2,
        shuffle=False,
        mp_start_method="spawn",  # of Horovod's, as the next one; neither has an effect
        reader_pool_type="thread",
    )
    assert estimator.getMpStartMethod() == "spawn"
    trained = estimator.fit_on_parquet(dataset_idx="mine")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for start in range(0, 12, 4):  # rank 0 has the first half of the rows, rank 1 the second
            rows = [*range(start, start + 4), *range(12 + start, 16 + start)]
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(
                model(torch.from_numpy(features[rows]))[:, 0], torch.tensor(labels[rows])
            )
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch.testing.assert_close(trained.getModel().weight, model.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained.getHistory()["loss"], np.reshape(losses, (2, 3)).mean(1), rtol=1e-5)


def test_a_pipeline_fits_is_saved_loaded_and_transforms(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    from hvdkit_spark.common.store import Store
    from hvdkit_spark.torch import TorchEstimator

    rows = [
        (float(a), float(b), float(a - 2 * b), int(a > b)) for a, b in np.random.default_rng(1).normal(size=(64, 2))
    ]
    df = spark.createDataFrame(rows, "a double, b double, y double, label int")
    model = torch.nn.Linear(2, 1)
    store = Store.create(str(tmp_path / "store"))
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        metrics=[torch.nn.functional.l1_loss],
        feature_cols=["features"],
        label_cols=["y"],
        store=store,
        num_proc=2,
        batch_size=8,
        epochs=3,
        validation=0.25,
        run_id="pipeline",
    )
    with pytest.raises(ConfigError, match=r"no column 'features'; it has a, b, y, label"):
        estimator.fit(df)
    estimator.save(str(tmp_path / "estimator"))
    estimator = TorchEstimator.load(str(tmp_path / "estimator"))
    fitted = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="features"), estimator]).fit(df)
    history = fitted.stages[-1].getHistory()
    assert set(history) == {"loss", "l1_loss", "val_loss", "val_l1_loss"} and len(history["loss"]) == 3
    assert history["val_loss"][-1] < history["val_loss"][0]
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    loaded = PipelineModel.load(str(tmp_path / "fitted"))
    found = loaded.transform(df).select("a", "b", "y__output").collect()
    trained = loaded.stages[-1].getModel()
    wanted = trained(torch.tensor([[row.a, row.b] for row in found], dtype=torch.float32))[:, 0].detach()
    np.testing.assert_allclose([row.y__output for row in found], wanted, rtol=1e-5, atol=1e-6)
    assert store.list(f"{store.prefix_path}") == ["runs"], "the rows are removed"
    assert store.list(store.get_checkpoint_path("pipeline")) == ["epoch-000003"]


def run_script(*command: str) -> str:
    env = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(map(str, PATH))}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master local[2] --conf spark.ui.enabled=false pyspark-shell")
    monkeypatch.chdir(tmp_path)
    printed = run_script(str(ROOT / "examples" / "spark_digits.py"), "--epochs", "6", "--min-accuracy", "0.83")
    assert re.search(r"^2 ranks  test accuracy \d", printed, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_keras_models_are_trained_continued_saved_and_transform() -> None:
    assert "all is well" in run_script(str(SUPPORT / "without_tensorflow.py"), str(HERE / "spark_keras_script.py"))
