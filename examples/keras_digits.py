"""Train a small network on handwritten digits, with KERAS_BACKEND=tensorflow, torch or jax; see the README here."""

import argparse
import os
import sys
import time
from typing import Any

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def read_digits() -> Any:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=360, random_state=0)


def make_model() -> keras.Model:
    """Two convolutions and two dense layers, about 150,000 parameters."""
    convolutions = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 64)]
    pooled = [layers.MaxPooling2D(), layers.Dropout(0.4), layers.Flatten()]
    dense = [layers.Dense(128, activation="relu"), layers.Dropout(0.4), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *pooled, *dense])


class Checkpoint(keras.callbacks.Callback):
    """Write the model after each epoch so that `path` is whole, the old one or the new one, if the machine stops."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.model.save(f"{self.path}.tmp.keras")
        with open(f"{self.path}.tmp.keras", "rb") as file:
            os.fsync(file.fileno())
        os.replace(f"{self.path}.tmp.keras", self.path)


class Speed(keras.callbacks.Callback):
    """Show how many samples a second all ranks together have trained on."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        logs["samples/s"] = round(self.samples / (time.perf_counter() - self.began))


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    keras.utils.set_random_seed(args.seed + hvd.rank())  # hvd: ranks drop out different neurons
    images, test_images, labels, test_labels = read_digits()
    images, labels = hvd.shard((images, labels))  # hvd
    test = hvd.shard((test_images, test_labels), evaluation=True)  # hvd

    model = make_model()
    rate = args.lr * hvd.linear_scale(args.batch_size * hvd.size(), reference=32)  # hvd
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)  # hvd
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # hvd
        hvd.callbacks.MetricAverageCallback(),  # hvd
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),  # hvd
        Speed(len(images) * hvd.size()),
    ]
    if args.checkpoint:
        callbacks.append(hvd.callbacks.on_rank_zero(Checkpoint(args.checkpoint)))  # hvd
    # Only rank 0 shows this, one line an epoch; verbose=1 shows a bar.
    model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=2, callbacks=callbacks)

    accuracy = hvd.evaluate(model, *test, batch_size=256, verbose=0)["accuracy"]  # hvd
    where = hvd.describe()  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%} of {len(test_images)} images\n{where}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for a joined batch of 32")
    parser.add_argument("--checkpoint", default="", help="file that rank 0 writes after each epoch; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
