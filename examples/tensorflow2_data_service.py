"""Handwritten digits whose images other processes prepare (tf.data service), and ranks train on.

    hvdrun -np 2 python -m hvdkit.tensorflow.data.compute_worker service.json &
    hvdrun -np 2 python tensorflow2_data_service.py --service service.json

The dispatcher of the service gives every image to one of the ranks, whichever asks first. Without --service each rank
prepares its own part.
"""

import argparse
import contextlib

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdkit.tensorflow as hvd  # hvd
from hvdkit.tensorflow.data import TfDataServiceConfig, tf_data_service  # hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--service", help="the file that the compute job writes; waits until it is there")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--min-accuracy", type=float, default=0.0)
options = parser.parse_args()

hvd.init()  # hvd
keras.utils.set_random_seed(1)
digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target.astype("int64")
train = np.arange(len(images)) % 5 != 0
STEPS = int(train.sum()) // 32 // hvd.size()  # hvd: of one epoch, on each rank


def prepare(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What costs time where there is much of it: here, move the image by a pixel at most."""
    padded = tf.image.pad_to_bounding_box(image, 1, 1, 10, 10)
    return tf.image.random_crop(padded, [8, 8, 1]), label


def make_dataset(address: str | None) -> tf.data.Dataset:
    """Make the batches of this rank."""
    data = tf.data.Dataset.from_tensor_slices((images[train], labels[train])).repeat()
    if address is None:
        data = data.shard(hvd.size(), hvd.rank())  # hvd
    data = data.shuffle(2000).map(prepare).batch(32)
    if address is not None:  # hvd: what was said so far is done by the workers
        mode = tf.data.experimental.service.ShardingPolicy.DYNAMIC
        data = data.apply(tf.data.experimental.service.distribute(mode, address, job_name="digits"))
    return data.prefetch(4)


model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(2e-3)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_on(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Train on a batch."""
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)  # hvd
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


step = tf.function(train_on)
hvd.broadcast_variables(model.variables, root_rank=0)  # hvd
config = TfDataServiceConfig.read(options.service, wait_for_file_creation=True) if options.service else None  # hvd
with tf_data_service(config, hvd.rank()) if config else contextlib.nullcontext() as address:  # hvd
    batches = iter(make_dataset(address))
    for epoch in range(options.epochs):
        losses = [float(step(*next(batches))) for _ in range(STEPS)]
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {np.mean(losses):.3f}", flush=True)
accuracy = float(np.mean(np.argmax(model(images[~train]), axis=1) == labels[~train]))
hvd.barrier()  # hvd: no rank reads any more
if hvd.rank() == 0:  # hvd
    if config:
        config.compute_client().shutdown()  # hvd: ends the compute job
    print(f"accuracy {accuracy:.3f}", flush=True)
assert accuracy >= options.min_accuracy, f"accuracy {accuracy:.3f} is below {options.min_accuracy}"
