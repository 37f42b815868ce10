"""Handwritten digits in Keras 3 on ranks of unequal speed: each gets rows of the batch by its measured speed.

    KERAS_BACKEND=jax hvdrun -np 3 python keras_uneven.py --slow-ms 2

--slow-ms makes the last rank slower by so many milliseconds a row.
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
    test = hvd.shard((test_images, test_labels), evaluation=True)  # hvd

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr))  # hvd
    # hvd: rows of all ranks; the loss stays a mean over the rows that a rank has
    data = hvd.BalancedDataset((images, labels), args.batch_size, optimizer, drop_last=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    row_s = args.slow_ms / 1000 if hvd.rank() == hvd.size() - 1 else 0.0  # hvd
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(row_s * data.plan[hvd.rank()])
    )
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), slow]  # hvd
    began = time.perf_counter()
    model.fit(data, epochs=args.epochs, verbose=2, callbacks=callbacks)
    rate = args.epochs * len(data) * args.batch_size / (time.perf_counter() - began)
    accuracy = hvd.evaluate(model, *test, batch_size=256, verbose=0)["accuracy"]  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"{rate:,.0f} samples/s  rows of the ranks {data.plan}\ntest accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=96, help="rows of a batch of all ranks together")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="that the last rank sleeps for each row")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    main(parser.parse_args())
