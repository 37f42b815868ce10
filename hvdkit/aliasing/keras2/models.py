"""Models: restore removed arguments of compile, fit and evaluate, the *_generator methods, and a few others."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdkit.aliasing.said import warn_once
from hvdkit.aliasing.tensorflow1 import check_eager

#: Arguments of compile() that Keras 3 does not have, and that can be ignored.
_COMPILE = ("experimental_run_tf_function", "distribute", "sample_weight_mode", "run_tf_function", "cloning")
#: Arguments of compile() after the loss, in Keras 2's order.
_AFTER_LOSS = ("metrics", "loss_weights", "weighted_metrics", "run_eagerly", "steps_per_execution", "jit_compile")
#: Arguments of fit, evaluate and predict.
_QUEUE = ("workers", "max_queue_size", "use_multiprocessing", "max_q_size", "pickle_safe")
_STEPS = ("steps_per_epoch", "validation_steps", "steps", "epochs", "initial_epoch", "validation_freq")


def apply(keras: ModuleType) -> None:
    """Patch keras.Model."""
    model = keras.Model
    # Patched in the class that defines it, because Keras compares a model's compile() with that class's.
    trainer = importlib.import_module("keras.src.trainers.trainer").Trainer
    trainer.compile = _compile(keras, trainer.compile)
    for name in ("fit", "evaluate", "predict"):
        setattr(model, name, _without_old_arguments(name, getattr(model, name)))
    for name, method in _GENERATORS.items():
        setattr(model, name, method)
    model.predict_classes = _predict_classes
    model.predict_proba = _predict_proba
    if not hasattr(model, "reset_states"):
        model.reset_states = _reset_states
    if not hasattr(keras.metrics.Metric, "reset_states"):
        keras.metrics.Metric.reset_states = _reset_metric
    model.metrics_names = property(_metrics_names)


def _compile(keras: ModuleType, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def compile(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        if keras.backend.backend() == "tensorflow":
            check_eager("model.compile()")
        args, kwargs = _with_metrics(args, kwargs)
        for name in _COMPILE:
            if name in kwargs:
                warn_once(f"compile({name}=...) was removed in Keras 3; the argument is ignored.")
                del kwargs[name]
        if "experimental_steps_per_execution" in kwargs:
            kwargs["steps_per_execution"] = kwargs.pop("experimental_steps_per_execution")
        if kwargs.get("target_tensors") is None:
            kwargs.pop("target_tensors", None)
        # XLA cannot compile communication; Keras 2 compiled only on request.
        if "jit_compile" not in kwargs and len(args) < 6 and keras.backend.backend() != "jax":
            kwargs["jit_compile"] = False
        return own(self, optimizer, *args, **kwargs)

    return compile


def _with_metrics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert Keras 2's arguments of compile() after the optimizer: metrics before loss_weights, or not in a list."""
    given = dict(kwargs)
    if 1 < len(args) <= 1 + len(_AFTER_LOSS) and "metrics" not in given:
        warn_once("compile() got metrics by position, third as in Keras 2; hvdkit passes them as metrics=.")
        placed = dict(zip(_AFTER_LOSS, args[1:], strict=False))
        if twice := placed.keys() & given.keys():
            raise TypeError(f"compile() got multiple values for {', '.join(sorted(twice))}")
        args, given = args[:1], {**placed, **given}
    for name in ("metrics", "weighted_metrics"):
        if given.get(name) is not None and not isinstance(given[name], (list, tuple, dict)):
            given[name] = [given[name]]
    return args, given


def _without_old_arguments(method: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **translate(method, kwargs))

    return run


def translate(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """Convert Keras 2's arguments of fit, evaluate or predict to Keras 3's."""
    given = dict(given)
    for name in _QUEUE:
        if name in given:
            warn_once(
                f"{method}({name}=...) was removed in Keras 3; the argument is ignored. Pass workers to the PyDataset."
            )
            del given[name]
    if "nb_epoch" in given:
        warn_once("fit(nb_epoch=...) was renamed in Keras 3; hvdkit passes it as epochs=.")
        given["epochs"] = given.pop("nb_epoch")
    for name in _STEPS:
        value: Any = given.get(name)
        if value is None or isinstance(value, (int, list, tuple, set)):
            continue
        whole = int(value)  # a float, or the type that broadcast() or NumPy returns
        if isinstance(value, float):
            warn_once(f"{method}({name}={value!r}): Keras 3 requires an integer; hvdkit uses {whole}.")
        given[name] = whole
    return given


def _generator(name: str, method: str) -> Callable[..., Any]:
    def run(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        warn_once(f"model.{name}() was removed in Keras 3; hvdkit calls model.{method}() instead.")
        given = dict(zip(_ORDER[name], args, strict=False))
        if method != "fit" and "verbose" not in given:
            kwargs.setdefault("verbose", 0)  # the generators' methods were silent
        return getattr(self, method)(generator, **given, **kwargs)

    run.__name__ = name
    return run


_ORDER = {
    "fit_generator": (
        "steps_per_epoch epochs verbose callbacks validation_data validation_steps validation_freq class_weight "
        "max_queue_size workers use_multiprocessing shuffle initial_epoch"
    ).split(),
    "evaluate_generator": "steps callbacks max_queue_size workers use_multiprocessing verbose".split(),
    "predict_generator": "steps callbacks max_queue_size workers use_multiprocessing verbose".split(),
}
_GENERATORS = {name: _generator(name, name.partition("_")[0]) for name in _ORDER}


def _predict_classes(self: Any, x: Any, batch_size: int | None = None, verbose: Any = 0) -> Any:
    warn_once("model.predict_classes() was removed in Keras 3; hvdkit uses the argmax of model.predict().")
    scores = self.predict(x, batch_size=batch_size, verbose=verbose)
    return scores.argmax(axis=-1) if scores.shape[-1] > 1 else (scores > 0.5).astype("int32")


def _predict_proba(self: Any, x: Any, batch_size: int | None = None, verbose: Any = 0) -> Any:
    warn_once("model.predict_proba() was removed in Keras 3; hvdkit calls model.predict() instead.")
    return self.predict(x, batch_size=batch_size, verbose=verbose)


def _reset_states(self: Any) -> None:
    warn_once("model.reset_states() was removed in Keras 3; hvdkit calls reset_state() of each stateful layer.")
    for layer in self._flatten_layers(include_self=False):
        reset = getattr(layer, "reset_state", None) or getattr(layer, "reset_states", None)
        if reset is not None and getattr(layer, "stateful", False):
            reset()


def _reset_metric(self: Any) -> None:
    warn_once("metric.reset_states() was renamed in Keras 3; hvdkit calls metric.reset_state() instead.")
    self.reset_state()


def _metrics_names(self: Any) -> list[str]:
    """Return the names of evaluate()'s values in their order, as Keras 2; Keras 3 has 'compile_metrics' for most."""
    names: list[str] = []
    for metric in self.metrics:
        if metric.name == "compile_metrics":
            names += [name for name in metric.result() if name not in names] if metric.built else []
        else:
            names.append(metric.name)
    return names
