"""KerasEstimator and KerasModel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import keras

from hvdkit.errors import ConfigError
from hvdkit_spark.common.estimator import HorovodEstimator
from hvdkit_spark.common.keras_backend import make_keras_predict
from hvdkit_spark.common.model import HorovodModel, Predict
from hvdkit_spark.common.params import Definition, with_params
from hvdkit_spark.common.training import Shapes, Trained, Training
from hvdkit_spark.keras.models import dump_model, dump_objects, load_model, load_objects, load_values
from hvdkit_spark.keras.training import KerasObjects, train

_CUSTOM = Definition("custom_objects", "name -> class or function of the model that Keras does not know")


@with_params(_CUSTOM, Definition("callbacks", "callbacks of fit() on all ranks"))
class KerasEstimator(HorovodEstimator):
    """Train a model of Keras 3 on the rows of a DataFrame: `KerasEstimator(model=..., ...).fit(df)`.

    model: a model with an input for each of feature_cols, in this order; int64 for columns of integers, float32 for
        others. The numbers of a row get the shape of the input, or of input_shapes.
    optimizer, loss, metrics, loss_weights: as for compile(); None for those of a model that is compiled.
    callbacks: as for fit(); on_rank_zero() of hvdkit.keras.callbacks makes a callback that acts on rank 0 only.
    The ranks use the backend that this process uses.
    The other parameters: see params.py, or explainParams().
    """

    dump_objects, load_objects = staticmethod(dump_objects), staticmethod(load_objects)

    def _check_framework(self) -> None:
        model = self.getOrDefault("model")
        if not isinstance(model, keras.Model):
            raise ConfigError(f"KerasEstimator: model is a {type(model).__name__}, no keras.Model.")
        if not model.built:
            raise ConfigError("KerasEstimator: the model has no weights yet. Start it with keras.Input.")
        if self._optimizer() is None or self._loss() is None:
            raise ConfigError("KerasEstimator needs the parameters optimizer and loss, or a model that is compiled.")

    def _optimizer(self) -> Any:
        given = self.getOrDefault("optimizer")
        return given if given is not None else getattr(self.getOrDefault("model"), "optimizer", None)

    def _loss(self) -> Any:
        given = self.getOrDefault("loss")
        return given if given is not None else getattr(self.getOrDefault("model"), "loss", None)

    def _input_shapes(self) -> Shapes | None:
        given: Shapes | None = self.getOrDefault("input_shapes")
        inputs = getattr(self.getOrDefault("model"), "inputs", None)
        if given is not None or not inputs:
            return given
        shapes = [list(each.shape[1:]) for each in inputs]
        return None if any(None in shape for shape in shapes) else [[-1, *shape] for shape in shapes]

    def _plan_ranks(self) -> tuple[Callable[[Training, bytes], Trained | None], bytes, dict[str, str]]:
        metrics = self.getOrDefault("metrics")
        objects = KerasObjects(
            model=dump_model(self.getOrDefault("model")),
            optimizer=keras.saving.serialize_keras_object(keras.optimizers.get(self._optimizer())),
            loss=self._loss(),
            metrics=list(metrics) if metrics else None,
            loss_weights=self.getOrDefault("loss_weights"),
            callbacks=list(self.getOrDefault("callbacks") or ()),
            custom_objects=dict(self.getOrDefault("custom_objects") or {}),
            compression=self.getOrDefault("gradient_compression"),
            backward_passes_per_step=self.getOrDefault("backward_passes_per_step"),
        )
        return train, cloudpickle.dumps(objects), {"KERAS_BACKEND": keras.backend.backend()}

    def _create_model(self, trained: Trained, **params: Any) -> KerasModel:
        custom_objects = self.getOrDefault("custom_objects")
        model = load_model(dump_model(self.getOrDefault("model")), custom_objects)
        load_values(trained.state, weights=model.variables)
        return KerasModel(model=model, custom_objects=custom_objects, **params)


@with_params(_CUSTOM)
class KerasModel(HorovodModel):
    """A trained model of Keras; keras() and getModel() return it."""

    dump_objects, load_objects = staticmethod(dump_objects), staticmethod(load_objects)

    def keras(self) -> Any:
        """The model, as in Horovod."""
        return self.getOrDefault("model")

    def _plan_prediction(self) -> Callable[[], Predict]:
        objects = {name: self.getOrDefault(name) for name in ("model", "custom_objects")}
        data, backend = dump_objects(objects), keras.backend.backend()
        return functools.partial(make_keras_predict, backend, data)
