"""KerasEstimator on a real Spark, in a process of its own, in which Keras has the backend that was asked for."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
from pyspark.sql import functions as sql
from spark_session import local_spark

from hvdkit.errors import ConfigError
from hvdkit_spark.common.store import Store
from hvdkit_spark.keras import KerasEstimator, KerasModel

with local_spark("local[2]") as spark, tempfile.TemporaryDirectory() as folder:
    points = np.random.default_rng(0).normal(size=(80, 3))
    rows = [([float(a), float(b)], float(c), int(a > b), float(a + c)) for a, b, c in points]
    df = spark.createDataFrame(rows, "x array<double>, z double, label int, t double")
    df = df.withColumn("check", sql.col("z") > 0.6)
    x, z = keras.Input((2,), name="x"), keras.Input((1,), name="z")
    both = keras.layers.Concatenate()([x, z])
    hidden = keras.layers.Dense(8, activation="relu")(both)
    outputs = [keras.layers.Dense(2, activation="softmax", name="c")(hidden), keras.layers.Dense(1, name="r")(hidden)]
    model = keras.Model([x, z], outputs)
    estimator = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.Adam(0.02),
        loss=["sparse_categorical_crossentropy", "mse"],
        loss_weights=[1.0, 0.5],
        feature_cols=["x", "z"],
        label_cols=["label", "t"],
        validation="check",
        store=Store.create(folder),
        batch_size=8,
        epochs=2,
        run_id="keras",
        partitions_per_process=1,
        num_proc=2,
    )
    first = estimator.fit(df)
    assert len(first.getHistory()["val_loss"]) == 2, first.getHistory()
    second = estimator.fit(df, {estimator.epochs: 5, estimator.num_proc: 1})
    history = second.getHistory()["val_loss"]
    assert history[:2] == first.getHistory()["val_loss"] and len(history) == 5, "it continues from the checkpoint"
    assert history[-1] < history[0]
    kept = KerasModel.dump_objects({"model": second.keras(), "history": second.getHistory()})  # as write() does
    assert KerasModel.load_objects(kept)["history"] == second.getHistory()
    second.setModel(KerasModel.load_objects(kept)["model"])
    found = second.transform(df).select("x", "z", "label__output", "t__output").collect()
    inputs = [np.array([row.x for row in found]), np.array([[row.z] for row in found])]
    classes, values = second.keras().predict(inputs, verbose=0)
    np.testing.assert_allclose([row.label__output.toArray() for row in found], classes, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row.t__output for row in found], values[:, 0], rtol=1e-4, atol=1e-5)
    try:
        estimator.fit(df, {estimator.feature_cols: ["z", "x"]})
    except ConfigError as error:
        assert "Column 'z' has 1 numbers in a row, but the shape [-1, 2] needs 2" in str(error), error
    else:
        raise AssertionError("columns in the wrong order are no error")
print("all is well")
