"""Train on handwritten digits with fit(), and go on when ranks die: from the last commit, with others in their place.

    KERAS_BACKEND=torch hvdrun --elastic -np 3 --min-np 2 python examples/keras_elastic_digits.py

On TensorFlow or PyTorch. Then end any rank, with `kill -9` and a number that `hvdrun --verbose` tells.
"""

import argparse
import sys
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def read_digits() -> Any:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)


def my_part(samples: int, state: Any, batch_size: int) -> Any:
    """Which samples of the rest of the epoch are this rank's; all ranks have as many, and share each batch."""
    left = np.random.default_rng(state.epoch).permutation(samples)[state.batch * batch_size :]
    return left[hvd.rank() :: hvd.size()][: len(left) // hvd.size()]  # hvd


@hvd.elastic.run  # hvd: called again, from the last commit, after each change of the world
def train(state: Any, images: Any, labels: Any, args: argparse.Namespace) -> None:
    """Train the state's model from where the state is."""
    keep = [
        hvd.elastic.UpdateBatchStateCallback(state),  # hvd
        hvd.elastic.UpdateEpochStateCallback(state),  # hvd
        hvd.elastic.CommitStateCallback(state, args.commit_every),  # hvd: what is lost is what came after this
    ]
    while state.epoch < args.epochs:  # hvd: from where the state is
        mine = my_part(len(images), state, args.batch_size)
        state.model.fit(
            images[mine],
            labels[mine],
            batch_size=args.batch_size // hvd.size(),  # hvd: together they are the same, however many ranks there are
            initial_epoch=state.epoch,
            epochs=state.epoch + 1,
            shuffle=False,
            verbose=2 if hvd.rank() == 0 else 0,  # hvd
            callbacks=keep,
        )


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    keras.utils.set_random_seed(0)
    images, test_images, labels, test_labels = read_digits()
    hidden = keras.layers.Dense(128, activation="relu")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10, activation="softmax")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr))  # hvd
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)  # hvd
    train(state, images, labels, args)

    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)  # the same on all ranks
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=96, help="samples in a batch of all ranks together")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--commit-every", type=int, default=5, help="batches from one commit to the next")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
