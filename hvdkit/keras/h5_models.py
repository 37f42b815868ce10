"""Whole models from `.h5` files, of Keras 3 and Keras 2, with an optimizer that goes on where it was.

Keras 3 builds the optimizer of such a file for no variables: its state is lost, and the next step fails with "Unknown
variable".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from hvdkit.keras.h5_optimizer import restore_optimizer
from hvdkit.log import logger

#: Arguments of Keras 2's optimizers that mean nothing any more.
_IDLE = ("is_legacy_optimizer", "jit_compile")


def load_h5_model(filepath: Any, custom_objects: Mapping[str, Any] | None = None, **options: Any) -> keras.Model:
    """As keras.saving.load_model; compiled, if it was, with the optimizer's state and iterations of the file.

    filepath: of a file of model.save(). options: those of keras.saving.load_model, without `compile`.
    Raises what that does, and ValueError if the optimizer's state does not fit the model.
    """
    objects = dict(custom_objects or {})
    model: keras.Model = keras.saving.load_model(filepath, custom_objects=objects, compile=False, **options)
    h5py = importlib.import_module("h5py")
    with h5py.File(filepath, "r") as file, keras.saving.custom_object_scope(objects):
        text = file.attrs.get("training_config")
        if text is None:
            logger.warning(
                "load_model(): %s has no training configuration, so the model is not compiled. Call model.compile().",
                filepath,
            )
            return model
        config = importlib.import_module("keras.src.legacy.saving.json_utils").decode(text)
        keras_2 = str(_text(file.attrs.get("keras_version", "1"))).startswith(("1.", "2."))
        if keras_2:
            config = _translate(config, objects)
        model.compile(
            optimizer=_make_optimizer(config["optimizer_config"], objects),
            loss=_resolve(config.get("loss"), keras.losses.deserialize, objects),
            metrics=_resolve(config.get("metrics"), keras.metrics.deserialize, objects),
            weighted_metrics=_resolve(config.get("weighted_metrics"), keras.metrics.deserialize, objects),
            loss_weights=config.get("loss_weights"),
        )
        restore_optimizer(model.optimizer, model, file, keras_2=keras_2)
    return model


def _make_optimizer(config: dict[str, Any], objects: Mapping[str, Any]) -> Any:
    kind = config["class_name"]
    if kind in objects or not hasattr(keras.optimizers, kind):
        return keras.optimizers.deserialize(config)
    # By its module: keras.optimizers.deserialize() does not find all of Keras's own by their names.
    return keras.saving.deserialize_keras_object({**config, "module": "keras.optimizers", "registered_name": None})


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _resolve(config: Any, deserialize: Callable[[Any], Any], objects: Mapping[str, Any]) -> Any:
    """What compile() takes for what the file holds: names stay names, unless they are of the script's own objects."""
    if isinstance(config, str):
        return objects.get(config) or keras.saving.get_registered_object(config) or config
    if isinstance(config, dict) and "class_name" in config:
        return deserialize(config)
    if isinstance(config, dict):
        return {name: _resolve(one, deserialize, objects) for name, one in config.items()}
    if isinstance(config, (list, tuple)):
        return [_resolve(one, deserialize, objects) for one in config]
    return config


def _translate(config: dict[str, Any], objects: Mapping[str, Any]) -> dict[str, Any]:
    """A training configuration of Keras 2 in Keras 3's words."""
    optimizer = dict(config["optimizer_config"])
    kind = optimizer["class_name"].removeprefix("Custom>")
    if kind not in objects and hasattr(keras.optimizers, kind):
        options = {name: value for name, value in optimizer["config"].items() if name not in _IDLE}
        if not options.get("decay") or kind == "Nadam":  # which had its momentum's decay there
            options.pop("decay", None)
        rate = options.get("learning_rate")
        if isinstance(rate, dict):  # a schedule; Keras 3 takes no name that is None
            named = {name: value for name, value in rate["config"].items() if (name, value) != ("name", None)}
            options["learning_rate"] = {**rate, "config": named}
        optimizer = {"class_name": kind, "config": options}
    return {
        **config,
        "optimizer_config": optimizer,
        "loss": _map_objects(config.get("loss"), _loss),
        "metrics": _map_objects(config.get("metrics"), _metric),
        "weighted_metrics": _map_objects(config.get("weighted_metrics"), _metric),
    }


def _map_objects(config: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    if isinstance(config, dict) and "class_name" in config:
        return change(config)
    if isinstance(config, dict):
        return {name: _map_objects(one, change) for name, one in config.items()}
    return [_map_objects(one, change) for one in config] if isinstance(config, (list, tuple)) else config


def _loss(config: dict[str, Any]) -> dict[str, Any]:
    """Without what Keras 2 writes of the function behind the class; `auto` was the sum over the batch's size."""
    options = {name: value for name, value in config["config"].items() if name != "fn"}
    if options.get("reduction") == "auto":
        options["reduction"] = "sum_over_batch_size"
    return {**config, "config": options}


def _metric(config: dict[str, Any]) -> Any:
    """A name in compile() comes as a wrapper of that name around a function."""
    if config["class_name"] != "MeanMetricWrapper":
        return config
    name: str = config["config"]["name"]
    if name in ("accuracy", "acc", "crossentropy", "ce"):
        return name  # what these are depends on the model's output
    try:
        keras.metrics.get(name)
    except ValueError:
        return config["config"]["fn"]
    return name
