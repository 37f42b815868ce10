"""Predict how diabetes goes on from ten measurements of a patient, in Keras 3; see the README here."""

import argparse
from typing import Any

import keras
from keras import layers
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def read_patients() -> Any:
    """353 patients to train on and 89 to test with: ten numbers, and the disease a year later, both about 1 large."""
    measured, disease = load_diabetes(return_X_y=True)
    tables = (measured * 21).astype("float32"), ((disease - 152) / 77).astype("float32")
    return train_test_split(*tables, test_size=0.2, random_state=0)


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    keras.utils.set_random_seed(args.seed)
    measured, test_measured, disease, test_disease = read_patients()
    measured, disease = hvd.shard((measured, disease))  # hvd
    test = hvd.shard((test_measured, test_disease), evaluation=True)  # hvd
    model = keras.Sequential([keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(args.lr, weight_decay=0.1))  # hvd
    model.compile(optimizer, "mse", metrics=["r2_score"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # hvd
        hvd.callbacks.MetricAverageCallback(),  # hvd
        keras.callbacks.ReduceLROnPlateau("loss", patience=3),
    ]
    model.fit(measured, disease, batch_size=args.batch_size, epochs=args.epochs, verbose=2, callbacks=callbacks)
    score = hvd.evaluate(model, *test, batch_size=256, verbose=0)["r2_score"]  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test R2 {score:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the patients")
    parser.add_argument("--batch-size", type=int, default=16, help="patients in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
