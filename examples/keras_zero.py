"""Divide AdamW's state among the ranks, with checkpoints for any number of ranks; see the README here."""

import argparse
import math
from typing import Any

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def read_digits() -> Any:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)


def megabytes(optimizer: keras.optimizers.Optimizer) -> float:
    """The size of the optimizer's state on this rank, in float32."""
    return float(4 * sum(math.prod(variable.shape) for variable in optimizer.variables) / 1e6)


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    keras.utils.set_random_seed(args.seed)
    images, test_images, labels, test_labels = read_digits()
    images, labels = hvd.shard((images, labels))  # hvd
    test = hvd.shard((test_images, test_labels), evaluation=True)  # hvd

    hidden = [layers.Dense(512, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, activation="softmax")])
    optimizer = keras.optimizers.AdamW(args.lr, global_clipnorm=args.clip)  # clips by the norm over all ranks
    optimizer = hvd.DistributedOptimizer(optimizer, shard="optimizer")  # hvd: each rank keeps its part of the moments
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]  # hvd
    first = 0
    if args.checkpoints:
        checkpoints = hvd.checkpoint.Checkpoints(args.checkpoints, model=model)  # hvd
        first = checkpoints.load_epoch()  # hvd: of whatever number of ranks
        callbacks.append(checkpoints.callback())  # hvd: rank 0 gets all parts, and writes them
    model.fit(
        images,
        labels,
        batch_size=args.batch_size,
        initial_epoch=first,
        epochs=args.epochs,
        verbose=2,
        callbacks=callbacks,
    )
    accuracy = hvd.evaluate(model, *test, batch_size=256, verbose=0)["accuracy"]  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"this rank keeps {megabytes(optimizer):.2f} MB of state\ntest accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="longest gradient")
    parser.add_argument("--checkpoints", default="", help="folder of checkpoints; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
