"""Handwritten digits in Keras 3, with ranks that step at their own pace: none waits unless it is too far ahead.

    hvdrun -np 3 python keras_asynchronous.py --slow-ms 40

--slow-ms makes the last rank slower by so many milliseconds a step.
"""

import argparse
import time

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd  # hvd


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    keras.utils.set_random_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    split = train_test_split((images / 16).astype("float32"), labels, test_size=360, random_state=0)
    images, test_images, labels, test_labels = split
    images, labels = hvd.shard((images, labels))  # hvd
    test = hvd.shard((test_images, test_labels), evaluation=True)  # hvd

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(args.lr)
    optimizer = hvd.AsynchronousOptimizer(optimizer, model=model, staleness=args.staleness)  # hvd
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    seconds = args.slow_ms / 1000 if hvd.rank() == hvd.size() - 1 else 0.0  # hvd
    wait = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(seconds))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), wait]  # hvd
    model.fit(images, labels, batch_size=32, epochs=args.epochs, verbose=0, callbacks=callbacks)
    optimizer.finish()  # hvd: all ranks have the same variables now
    accuracy = hvd.evaluate(model, *test, batch_size=256, verbose=0)["accuracy"]  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--staleness", type=int, default=4, help="0: every step waits for all ranks")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="of the last rank, in each step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
