"""TorchEstimator and TorchModel."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

from hvdkit.errors import ConfigError
from hvdkit_spark.common.estimator import HorovodEstimator
from hvdkit_spark.common.model import HorovodModel, Predict
from hvdkit_spark.common.training import Trained, Training
from hvdkit_spark.torch.training import train

_OBJECTS = ("model", "optimizer", "loss", "loss_weights", "metrics", "gradient_compression", "backward_passes_per_step")


class TorchEstimator(HorovodEstimator):
    """Train a torch.nn.Module on the rows of a DataFrame: `TorchEstimator(model=..., ...).fit(df)`.

    model: called with one tensor for each of feature_cols; int64 for columns of integers, float32 for others; of shape
        (rows,) for numbers and (rows, n) for arrays, or as input_shapes gives.
    optimizer: an optimizer of model.parameters().
    loss: function of an output and its label, mean over the rows; a label with as many numbers as the output gets its
        shape. A list for several outputs.
    metrics: functions of output and label, or of both as lists for several outputs, that return a mean over the rows.
    sample_weight_col: the loss must have `reduction`, as the losses of torch have.
    The other parameters: see params.py, or explainParams().
    """

    def _check_framework(self) -> None:
        if self.getOrDefault("optimizer") is None or not self.getOrDefault("loss"):
            raise ConfigError("TorchEstimator needs the parameters optimizer and loss.")
        model = self.getOrDefault("model")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"TorchEstimator: model is a {type(model).__name__}, no torch.nn.Module.")
        held = {id(each) for group in self.getOrDefault("optimizer").param_groups for each in group["params"]}
        if not held <= {id(each) for each in model.parameters()}:
            raise ConfigError("TorchEstimator: the optimizer has parameters that are not those of the model.")

    def _plan_ranks(self) -> tuple[Callable[[Training, bytes], Trained | None], bytes, dict[str, str]]:
        # In one pickle, so that the optimizer keeps the parameters of the model.
        return train, cloudpickle.dumps({name: self.getOrDefault(name) for name in _OBJECTS}), {}

    def _create_model(self, trained: Trained, **params: Any) -> TorchModel:
        model = copy.deepcopy(self.getOrDefault("model"))
        model.load_state_dict(torch.load(io.BytesIO(trained.state), map_location="cpu", weights_only=True))
        return TorchModel(model=model, **params)


class TorchModel(HorovodModel):
    """A trained torch.nn.Module; getModel() returns it."""

    def _plan_prediction(self) -> Callable[[], Predict]:
        return functools.partial(make_predict, cloudpickle.dumps(self.getOrDefault("model")))


def make_predict(data: bytes) -> Predict:
    """Make the function that predicts with a pickled module, on the CPU."""
    model = pickle.loads(data).cpu().eval()

    def predict(inputs: list[Any]) -> list[Any]:
        with torch.inference_mode():
            outputs = model(*map(torch.from_numpy, inputs))
        return [each.numpy() for each in (outputs if isinstance(outputs, list | tuple) else [outputs])]

    return predict
