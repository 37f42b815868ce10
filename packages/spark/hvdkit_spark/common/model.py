"""The transformer that a fitted estimator returns, whatever its framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

from hvdkit.errors import ConfigError
from hvdkit_spark.common.dataset import cast_array
from hvdkit_spark.common.params import MODEL, with_params
from hvdkit_spark.common.persistence import Saved
from hvdkit_spark.common.prepare import as_numbers
from hvdkit_spark.common.training import Shapes, shape_arrays

_ALL = "hvdkit_outputs"

#: Arrays of the inputs -> arrays of the outputs, each with the rows as its first axis.
Predict = Callable[[list[NDArray[Any]]], list[NDArray[Any]]]


@with_params(*MODEL)
class HorovodModel(Model, Saved):
    """A trained model: transform() adds a column for each of its outputs.

    An output of one number for a row is a float, else a vector of pyspark.ml.
    """

    def _plan_prediction(self) -> Callable[[], Predict]:
        """Return a function that makes the prediction function in a Python worker of Spark."""
        raise NotImplementedError

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features, outputs = self.getOrDefault("feature_columns"), self.getOrDefault("output_cols")
        widths, batch_size = self.getOrDefault("output_widths"), self.getOrDefault("batch_size")
        if not (features and outputs and widths) or len(outputs) != len(widths):
            raise ConfigError(
                f"{type(self).__name__} needs the parameters feature_columns, output_cols and output_widths, the last "
                f"two of the same length; they are {features}, {outputs} and {widths}."
            )
        names = [f"output_{number}" for number in range(len(outputs))]
        kind = StructType([StructField(name, ArrayType(FloatType())) for name in names])
        function = plan_rows(self._plan_prediction(), names, self.getOrDefault("input_shapes"), batch_size)
        predict: Any = sql.pandas_udf(function, kind)
        found = dataset.withColumn(_ALL, predict(*(as_numbers(dataset, name) for name in features)))
        for name, output, width in zip(names, outputs, widths, strict=True):
            array = sql.col(f"{_ALL}.{name}")
            found = found.withColumn(output, array[0] if width == 1 else array_to_vector(array))
        return found.drop(_ALL)


def plan_rows(
    make: Callable[[], Predict], names: list[str], shapes: Shapes | None, batch_size: int
) -> Callable[[Iterator[tuple[pd.Series, ...]]], Iterator[pd.DataFrame]]:
    """Make the function of a pandas UDF: columns of features -> a column of arrays for each output, by its name."""

    def predict_rows(parts: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        predict = make()
        for part in parts:
            columns = part if isinstance(part, tuple) else (part,)  # Spark passes a single column as it is
            arrays = [_to_array(column) for column in columns]
            batches = [
                predict(shape_arrays([array[start : start + batch_size] for array in arrays], shapes))
                for start in range(0, len(columns[0]), batch_size)
            ]
            yield pd.DataFrame(
                {name: [row for batch in batches for row in _flat(batch[at])] for at, name in enumerate(names)}
            )

    return predict_rows


def _to_array(column: pd.Series) -> NDArray[Any]:
    if column.dtype == object and len(column):
        return cast_array(np.stack(column.to_list()))
    return cast_array(column.to_numpy())


def _flat(output: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(output, np.float32).reshape(len(output), -1)
