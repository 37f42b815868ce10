"""Train a small network on handwritten digits; the lines marked `# hvd` are what `hvdrun -np 2 python FILE` needs."""

import argparse
import sys
import time

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits

import hvdkit.tensorflow as hvd  # hvd
from hvdkit.training.schedules import linear_scale, warmup_multiplier  # hvd
from hvdkit.training.sharding import plan_order, split_for_evaluation, split_for_training  # hvd

Digits = tuple[NDArray[np.float32], NDArray[np.int64]]


def read_digits() -> tuple[Digits, Digits]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    train, test = np.split(np.random.RandomState(0).permutation(len(images)), [1437])
    return (images[train], labels[train]), (images[test], labels[test])


def make_model() -> tf.keras.Model:
    """Two convolutions and two linear layers, about 150,000 parameters."""
    layers = tf.keras.layers
    convolutions = [layers.Conv2D(count, 3, padding="same", activation="relu") for count in (32, 64)]
    linear = [layers.Dense(128, activation="relu"), layers.Dropout(0.4), layers.Dense(10)]
    middle = [layers.MaxPooling2D(), layers.Dropout(0.4), layers.Flatten()]
    return tf.keras.Sequential([tf.keras.Input((8, 8, 1)), *convolutions, *middle, *linear])


def main(args: argparse.Namespace) -> int:
    """Train, test, and return the exit code."""
    hvd.init()  # hvd
    tf.config.threading.set_intra_op_parallelism_threads(1)  # hvd: the ranks of a host share its cores
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())  # hvd: ranks drop out different neurons
    (images, labels), (test_images, test_labels) = read_digits()

    model = make_model()
    factor = linear_scale(args.batch_size * hvd.size(), reference=32)  # hvd
    optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)  # hvd
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    def compute_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        tape = hvd.DistributedGradientTape(tape)  # hvd
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    train_step = tf.function(compute_step, reduce_retracing=True)  # the last batch of an epoch is smaller
    steps = -(-len(images) // (args.batch_size * hvd.size()))  # hvd
    console = Console(quiet=hvd.rank() != 0, highlight=False, soft_wrap=True)  # hvd
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("epoch 1", total=args.epochs * steps)
        for epoch in range(args.epochs):
            order = plan_order(len(images), seed=args.seed, epoch=epoch)
            mine = split_for_training(order, rank=hvd.rank(), size=hvd.size())  # hvd: as many samples on every rank
            total, began = 0.0, time.perf_counter()
            for step in range(steps):
                warmup = warmup_multiplier(epoch + step / steps, factor=factor, warmup_epochs=3)  # hvd
                optimizer.learning_rate.assign(args.lr * factor * warmup)  # hvd
                batch = mine[step * args.batch_size :][: args.batch_size]
                total += float(train_step(images[batch], labels[batch])) * len(batch)
                progress.advance(bar)
            rate = len(mine) * hvd.size() / (time.perf_counter() - began)
            loss = float(hvd.allreduce(tf.constant(total / len(mine))))  # hvd
            shown = f"epoch {epoch + 1}  loss {loss:.4f}  {rate:,.0f} samples/s"
            progress.update(bar, description=shown)
            console.print(shown)
            if args.checkpoint and hvd.rank() == 0:  # hvd
                tf.train.CheckpointManager(checkpoint, args.checkpoint, max_to_keep=1).save(epoch + 1)

    part = split_for_evaluation(np.arange(len(test_labels)), rank=hvd.rank(), size=hvd.size())  # hvd
    right = tf.argmax(model(test_images[part], training=False), axis=1) == test_labels[part]
    accuracy = int(hvd.allreduce(tf.reduce_sum(tf.cast(right, tf.int64)), op=hvd.Sum)) / len(test_labels)  # hvd
    console.print(f"test accuracy {accuracy:.2%} of {len(test_labels)} images")
    console.print(hvd.describe())  # hvd
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for a joined batch of 32")
    parser.add_argument("--checkpoint", default="", help="folder that rank 0 writes each epoch; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    sys.exit(main(parser.parse_args()))
