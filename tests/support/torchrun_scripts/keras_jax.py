"""Keras' distribution on JAX: the processes find each other, and add up over all of them."""

import json
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
from jax.experimental import multihost_utils

keras.distribution.initialize()
ranks = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()]))
print(json.dumps({"rank": jax.process_index(), "size": jax.process_count(), "ranks": ranks.flatten().tolist()}))
