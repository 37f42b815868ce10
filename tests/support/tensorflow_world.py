"""Bodies for ranks that work with TensorFlow: a world of a wished transport, eager mode or a tf.function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from openers import OPENERS

import hvdkit.tensorflow as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime as engine
from hvdkit.tensorflow.arithmetic import TensorflowArithmetic
from hvdkit.transport.api import Transport
from hvdkit.transport.select import Connection, open_transport
from hvdkit.world import World


@contextmanager
def joined(transport: str = "auto", **settings: Any) -> Iterator[None]:
    """Between init() and shutdown(). transport: a name of Config's or, for simulated hosts, of OPENERS."""
    if os.environ.get("HVDKIT_ENGINE") == "horovod":
        transport = "auto"  # it has its own
    if transport.startswith("hierarchical_"):

        def opener(config: Config, connection: Connection) -> tuple[World, Transport]:
            world, first = open_transport(config, connection)
            first.close()
            return world, OPENERS[transport]()

        engine.init(arithmetic=TensorflowArithmetic(), opener=opener, transport="mpi", **settings)
    else:
        hvd.init(transport=transport, **settings)
    yield
    hvd.shutdown()


def in_mode(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, as a graph, or in a graph of its own for a tf.compat.v1.Session."""
    if mode == "session":
        return functools.partial(_in_session, function)
    return tf.function(function) if mode == "graph" else function


def _in_session(function: Callable[..., Any], *args: Any) -> Any:
    """Its results, as eager tensors. One thread computes: no operation may hold it while others wait to begin."""
    given = [np.asarray(one) for one in args]
    with tf.Graph().as_default():
        results = function(*[tf.constant(one) for one in given])
        if results is None:
            return None
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
        with tf.compat.v1.Session(config=config) as session:
            values = session.run(tf.nest.flatten(results))
    return tf.nest.pack_sequence_as(results, [tf.constant(one) for one in values])
