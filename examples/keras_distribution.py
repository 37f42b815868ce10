"""Train with Keras' own distribution on JAX: data parallel, or with kernels divided among ranks; see the README."""

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def read_digits() -> Any:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)


def make_model() -> keras.Model:
    """Two dense layers; the layout map below finds their variables by name."""
    hidden = layers.Dense(128, activation="relu", name="hidden")
    return keras.Sequential([keras.Input((64,)), hidden, layers.Dense(10, activation="softmax", name="output")])


def make_distribution(parts: int) -> Any:
    """Divide the hidden layer's columns, and the output layer's rows, among `parts` ranks; 1: data parallel."""
    if parts == 1:
        return keras.distribution.DataParallel(auto_shard_dataset=False)
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((len(devices) // parts, parts), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*hidden/kernel"] = (None, "model")
    layout[".*hidden/bias"] = ("model",)
    layout[".*output/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False)


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    if hvd.size() % args.parts:  # hvd
        sys.exit(f"--parts {args.parts} does not divide {hvd.size()} ranks")
    hvd.distribution.initialize()  # hvd: before anything is computed
    keras.utils.set_random_seed(args.seed)  # the same on all ranks
    keras.distribution.set_distribution(make_distribution(args.parts))
    # Ranks that hold parts of one model have the same samples.
    part = {"rank": hvd.rank() // args.parts, "size": hvd.size() // args.parts}  # hvd
    images, test_images, labels, test_labels = read_digits()
    images, labels = hvd.shard((images, labels), uneven="drop", **part)  # hvd
    test_images, test_labels = hvd.shard((test_images, test_labels), uneven="drop", **part)  # hvd

    model = make_model()
    model.compile(keras.optimizers.SGD(args.lr, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    if args.parts > 1:
        hvd.distribution.check_layout(model)  # hvd: a misspelt name would divide nothing
    first = hvd.rank() == 0  # hvd
    model.fit(
        images,
        labels,
        batch_size=args.batch_size // part["size"],  # of this rank; Keras joins them
        epochs=args.epochs,
        shuffle=False,  # Keras would shuffle each rank's samples by themselves
        verbose=2 if first else 0,
    )
    accuracy = model.evaluate(test_images, test_labels, batch_size=30, verbose=0)[1]
    kernel = model.get_layer("hidden").kernel.value
    held = kernel.addressable_shards[0].data.shape
    if first:
        print(f"test accuracy {accuracy:.2%}; the hidden kernel {kernel.shape} is held as {held} on each rank")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--parts", type=int, default=1, help="ranks among which a model is divided")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=48, help="samples in a batch of all ranks")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the same on all ranks")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
