"""hvdkit's errors as errors of TensorFlow, with the classes that Horovod's operations raise."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.errors import (
    DuplicateNameError,
    HorovodInternalError,
    HvdkitError,
    NotInitializedError,
    RanksDisagreeError,
)

_OpError = tf.errors.OpError

#: hvdkit's class -> TensorFlow's classes; the first match counts. Source: Horovod 0.28.1, ConvertStatus() in
#: tensorflow/mpi_ops.cc, with PRECONDITION_ERROR if the ranks disagree and before init(), INVALID_ARGUMENT for
#: arguments and names, UNKNOWN_ERROR if a rank has gone. Eager operations always raised FailedPreconditionError too.
_CLASSES: tuple[tuple[type[Exception], tuple[type[Exception], ...]], ...] = (
    (DuplicateNameError, (tf.errors.InvalidArgumentError,)),
    (NotInitializedError, (tf.errors.FailedPreconditionError,)),
    (RanksDisagreeError, (tf.errors.FailedPreconditionError,)),
    (HorovodInternalError, (tf.errors.UnknownError, tf.errors.FailedPreconditionError)),
    (ValueError, (tf.errors.InvalidArgumentError,)),
)
_CODES: dict[type[Exception], int] = {
    tf.errors.InvalidArgumentError: tf.errors.INVALID_ARGUMENT,
    tf.errors.FailedPreconditionError: tf.errors.FAILED_PRECONDITION,
    tf.errors.UnknownError: tf.errors.UNKNOWN,
}


def as_tensorflow_error(error: Exception) -> Exception:
    """Return the error with its own class and TensorFlow's; unchanged if it has one already, or none matches.

    The classes: see _CLASSES. Text, attributes and traceback stay. Errors of other libraries are not changed: their
    classes may need arguments of their own.
    """
    known: bool = isinstance(error, _OpError)
    if known or not (isinstance(error, HvdkitError) or type(error) is ValueError):
        return error
    for kind, classes in _CLASSES:
        if isinstance(error, kind):
            made = _again(type(error), classes, str(error))
            made.__dict__.update(error.__dict__)
            return made.with_traceback(error.__traceback__)
    return error


def code_of(error: Exception) -> int:
    """Return TensorFlow's code for an hvdkit error, UNKNOWN if none matches."""
    for kind, classes in _CLASSES:
        if isinstance(error, kind):
            return _CODES[classes[0]]
    return int(tf.errors.UNKNOWN)


def _both(own: type[Exception], classes: tuple[type[Exception], ...]) -> Any:
    """Make a class that derives from both; AutoGraph recognizes an OpError by its constructor's arguments."""

    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        _OpError.__init__(self, node_def, op, message, _CODES[classes[0]], *args)
        self.args = (message,)

    def __reduce__(self: Any) -> Any:
        return _again, (own, classes, str(self))

    body = {"__module__": own.__module__, "__doc__": own.__doc__, "__init__": __init__, "__reduce__": __reduce__}
    return type(own.__name__, (own, *classes), body)


def _again(own: type[Exception], classes: tuple[type[Exception], ...], message: str) -> Exception:
    if (own, classes) not in _made:
        _made[own, classes] = _both(own, classes)
    error: Exception = _made[own, classes](None, None, message)
    return error


_made: dict[tuple[type[Exception], tuple[type[Exception], ...]], Any] = {}
