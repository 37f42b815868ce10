"""Writing a DataFrame to Parquet files that the ranks read: plain numbers, and arrays in place of vectors."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, BooleanType, DataType, NumericType

from hvdkit.errors import ConfigError
from hvdkit_spark.common.store import Store

_VECTORS = ("VectorUDT",)
_CHOSEN = "hvdkit_is_validation"


def as_numbers(df: DataFrame, name: str) -> Column:
    """Select a column as numbers or arrays of numbers. Raises ConfigError if it is missing or has another type."""
    if name not in df.columns:
        raise ConfigError(f"The DataFrame has no column {name!r}; it has {', '.join(df.columns)}.")
    kind, column = df.schema[name].dataType, sql.col(f"`{name}`")
    if is_vector(kind):
        return vector_to_array(column, "float32")
    numeric = kind.elementType if isinstance(kind, ArrayType) else kind
    if not isinstance(numeric, NumericType | BooleanType):
        raise ConfigError(
            f"Column {name!r} is of type {kind.simpleString()}. The estimator takes numbers, booleans, arrays of these "
            "and vectors of pyspark.ml. Convert text with StringIndexer, and nested arrays with flatten()."
        )
    if "decimal" in kind.simpleString():
        return column.cast("array<double>" if isinstance(kind, ArrayType) else "double")
    return column


def is_vector(kind: DataType) -> bool:
    """Is this the type of the vectors of pyspark.ml or pyspark.mllib?"""
    return type(kind).__name__ in _VECTORS


def write_data(
    df: DataFrame,
    columns: Sequence[str],
    validation: float | str | None,
    store: Store,
    index: str,
    partitions: int,
    seed: int,
) -> bool:
    """Write the rows of training and of validation to the store; returns whether it wrote rows of validation.

    df: the DataFrame.
    columns: names of the columns to write.
    validation: fraction of the rows, drawn at random, or name of a column that is true (or above 0) in the rows of
        validation; None for no validation.
    store: the store.
    index: index of the data set, see Store.get_train_data_path.
    partitions: number of files for each of the two.
    seed: seed of the draw.
    Raises ConfigError for columns that cannot be written.
    """
    numbers = [as_numbers(df, name).alias(name) for name in columns]
    if not validation:
        _write(df.select(numbers), store.get_train_data_path(index), partitions)
        return False
    if isinstance(validation, str):
        if validation not in df.columns:
            raise ConfigError(f"validation={validation!r} is no column; there are {', '.join(df.columns)}.")
        chosen = sql.coalesce(sql.col(f"`{validation}`").cast("double") > 0, sql.lit(False))
    else:
        chosen = sql.rand(seed) < validation
    marked = df.select(*numbers, chosen.alias(_CHOSEN)).persist()  # each row is drawn once, for both files
    try:
        _write(marked.where(~sql.col(_CHOSEN)).drop(_CHOSEN), store.get_train_data_path(index), partitions)
        _write(marked.where(sql.col(_CHOSEN)).drop(_CHOSEN), store.get_val_data_path(index), partitions)
    finally:
        marked.unpersist()
    return True


def _write(df: DataFrame, path: str, partitions: int) -> None:
    df.repartition(partitions).write.mode("overwrite").parquet(path)
