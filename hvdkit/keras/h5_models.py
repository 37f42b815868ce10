"""Loading of whole models from `.h5` files, of Keras 3 and Keras 2, with their optimizers' states.

Keras 3 itself builds the optimizer of such a file without variables: its state is lost, and the next step fails with
"Unknown variable".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from hvdkit.keras.h5_optimizer import restore_optimizer
from hvdkit.log import logger

#: Arguments of Keras 2's optimizers that have no effect any more.
_IDLE = ("is_legacy_optimizer", "jit_compile")


def load_h5_model(filepath: Any, custom_objects: Mapping[str, Any] | None = None, **options: Any) -> keras.Model:
    """As keras.saving.load_model; a compiled model gets the optimizer's state and iterations from the file.

    filepath: a file of model.save(). options: those of keras.saving.load_model, without `compile`.
    Raises what keras.saving.load_model raises, and ValueError if the optimizer's state does not fit the model.
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
    # With the module's name: keras.optimizers.deserialize() does not find all of Keras's own classes by name.
    return keras.saving.deserialize_keras_object({**config, "module": "keras.optimizers", "registered_name": None})


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _resolve(config: Any, deserialize: Callable[[Any], Any], objects: Mapping[str, Any]) -> Any:
    """Convert the file's content to arguments of compile(); names stay names unless they name the script's objects."""
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
    """Translate a Keras 2 training configuration to Keras 3."""
    optimizer = dict(config["optimizer_config"])
    kind = optimizer["class_name"].removeprefix("Custom>")
    if kind not in objects and hasattr(keras.optimizers, kind):
        options = {name: value for name, value in optimizer["config"].items() if name not in _IDLE}
        if not options.get("decay") or kind == "Nadam":  # Nadam stored the decay of its momentum there
            options.pop("decay", None)
        rate = options.get("learning_rate")
        if isinstance(rate, dict):  # a schedule; Keras 3 accepts no name that is None
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
    """Remove the entry of the function behind the class; `auto` meant the sum divided by the batch size."""
    options = {name: value for name, value in config["config"].items() if name != "fn"}
    if options.get("reduction") == "auto":
        options["reduction"] = "sum_over_batch_size"
    return {**config, "config": options}


def _metric(config: dict[str, Any]) -> Any:
    """Replace a MeanMetricWrapper by its metric's name, or by its function if the name is unknown."""
    if config["class_name"] != "MeanMetricWrapper":
        return config
    name: str = config["config"]["name"]
    if name in ("accuracy", "acc", "crossentropy", "ce"):
        return name  # their meaning depends on the model's output
    try:
        keras.metrics.get(name)
    except ValueError:
        return config["config"]["fn"]
    return name
