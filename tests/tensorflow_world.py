"""Bodies for ranks that work with TensorFlow: a world of a wished transport, eager mode or a tf.function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from openers import OPENERS

import hvdkit.tensorflow as hvd
from hvdkit.config import Config
from hvdkit.engine import runtime as engine
from hvdkit.tensorflow.arithmetic import TensorflowArithmetic
from hvdkit.transport import Abort, open_transport
from hvdkit.transport.base import Transport
from hvdkit.transport.mpi_part import Part
from hvdkit.world import World


@contextmanager
def joined(transport: str = "auto", **settings: Any) -> Iterator[None]:
    """Between init() and shutdown(). transport: a name of Config's or, for simulated hosts, of OPENERS."""
    if os.environ.get("HVDKIT_ENGINE") == "horovod":
        transport = "auto"  # it has its own
    if transport.startswith("hierarchical_"):

        def opener(config: Config, part: Part | None) -> tuple[World, Transport, Abort | None]:
            world, first, abort = open_transport(config, part)
            first.close()
            return world, OPENERS[transport](), abort

        engine.init(arithmetic=TensorflowArithmetic(), opener=opener, transport="mpi", **settings)
    else:
        hvd.init(transport=transport, **settings)
    yield
    hvd.shutdown()


def in_mode(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or as a graph."""
    return tf.function(function) if mode == "graph" else function
