"""Train on handwritten digits in Spark: `python examples/spark_digits.py --ranks 2`, or spark-submit.

A DataFrame goes through an ML pipeline whose last stage trains on ranks that are Spark's tasks. `--by-hand` trains by a
function of one's own instead. The store must be a folder that all executors see.
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import MinMaxScaler, VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import hvdkit.torch as hvd  # hvd
import hvdkit_spark  # hvd
from hvdkit_spark.common.store import Store  # hvd
from hvdkit_spark.torch import TorchEstimator  # hvd


def make_model() -> nn.Module:
    """The same network on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def fit(df: DataFrame, ranks: int, epochs: int, store: str) -> float:
    """Train by an estimator; returns the accuracy on rows that it has not seen."""
    model = make_model()
    estimator = TorchEstimator(  # hvd
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.003),
        loss=nn.CrossEntropyLoss(),
        feature_cols=["scaled"],
        label_cols=["digit"],
        validation=0.1,
        store=Store.create(store),
        num_proc=ranks,
        batch_size=32,
        epochs=epochs,
    )
    pixels = [name for name in df.columns if name.startswith("pixel")]
    known, test = df.randomSplit([0.8, 0.2], seed=0)
    assemble, scale = VectorAssembler(inputCols=pixels, outputCol="features"), MinMaxScaler()
    scale.setInputCol("features").setOutputCol("scaled")
    fitted = Pipeline(stages=[assemble, scale, estimator]).fit(known)
    print("loss of validation:", [round(each, 3) for each in fitted.stages[-1].getHistory()["val_loss"]])
    rows = fitted.transform(test).select("digit", "digit__output").collect()
    return float(sum(int(row.digit__output.argmax()) == row.digit for row in rows) / len(rows))


def train(epochs: int) -> float:
    """Train by hand: what each rank does; returns the accuracy."""
    hvd.init()  # hvd
    images, digits = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = (images / 16).float()
    model = make_model()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.003)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvd
    sampler = hvd.data.ShardedSampler(range(1437))  # hvd
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), digits[rows]).backward()
            optimizer.step()
    return float((model(images[1437:]).argmax(1) == digits[1437:]).float().mean())


def main(args: argparse.Namespace) -> int:
    """Start Spark, train, print the accuracy and return the exit code."""
    spark = SparkSession.builder.getOrCreate()
    if args.by_hand:
        accuracy = hvdkit_spark.run(train, (args.epochs,), num_proc=args.ranks)[0]  # hvd
    else:
        images, digits = load_digits(return_X_y=True)
        names = [*(f"pixel{number}" for number in range(64)), "digit"]
        rows = [(*image, int(digit)) for image, digit in zip(images.tolist(), digits, strict=True)]
        df = spark.createDataFrame(rows, names)
        with tempfile.TemporaryDirectory() as folder:
            accuracy = fit(df, args.ranks, args.epochs, args.store or folder)
    print(f"{args.ranks} ranks  test accuracy {accuracy:.2%}")
    spark.stop()
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--by-hand", action="store_true", help="train by a function in place of an estimator")
    parser.add_argument("--store", help="folder or URL that all executors see; a temporary folder if it is left out")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
