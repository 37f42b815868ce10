"""Data sets: the row groups of Parquet files, and the columns that become arrays."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import ConfigError
from hvdkit_spark.common.store import Store

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file. path: in Spark's form, a URL."""

    path: str
    number: int
    rows: int


@dataclass(frozen=True)
class DataSet:
    """The row groups of a folder, in the same order on all ranks.

    widths: length of the arrays of a column; 0 for scalars.
    """

    groups: tuple[RowGroup, ...]
    widths: dict[str, int]

    @property
    def rows(self) -> int:
        """Number of rows of all row groups."""
        return sum(group.rows for group in self.groups)


def read_dataset(store: Store, path: str, columns: Sequence[str]) -> DataSet:
    """Read the footers of the Parquet files in a folder. Raises ConfigError if they lack rows or one of the columns."""
    parquet = importlib.import_module("pyarrow.parquet")
    groups: list[RowGroup] = []
    widths: dict[str, int] = {}
    for name in store.list(path):
        if not name.endswith(".parquet"):
            continue
        with store.open(f"{path}/{name}") as opened:
            file = parquet.ParquetFile(opened)
            missing = [column for column in columns if column not in file.schema_arrow.names]
            if missing:
                raise ConfigError(
                    f"{path}/{name} has no column {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}."
                )
            groups += [
                RowGroup(f"{path}/{name}", number, file.metadata.row_group(number).num_rows)
                for number in range(file.metadata.num_row_groups)
            ]
            if not widths and file.metadata.num_rows:
                first = next(file.iter_batches(1, columns=list(columns)))
                widths = {column: _width(column, first.column(column)) for column in columns}
    groups = [group for group in groups if group.rows]
    if not groups:
        raise ConfigError(f"There are no rows in the Parquet files of {path}.")
    return DataSet(tuple(groups), widths)


def read_group(store: Store, group: RowGroup, widths: dict[str, int], start: int, stop: int) -> Arrays:
    """Read rows of a row group as arrays: (n,) for scalars, else (n, width). float32, or int64 for integers.

    store: the store of the file.
    group: the row group.
    widths: see DataSet.
    start, stop: the rows of the group, `stop` excluded.
    Raises ConfigError for a null, and for rows whose arrays have other lengths.
    """
    parquet = importlib.import_module("pyarrow.parquet")
    with store.open(group.path) as opened:
        table = parquet.ParquetFile(opened).read_row_group(group.number, columns=list(widths))
    table = table.slice(start, stop - start).combine_chunks()
    return {name: _to_array(name, table.column(name), width) for name, width in widths.items()}


def _width(name: str, column: Any) -> int:
    types = importlib.import_module("pyarrow").types
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        return 0
    first = column[0].as_py()
    if not first:
        raise ConfigError(f"Column {name!r} has a null or an empty array. Every row needs an array of the same length.")
    return len(first)


def _to_array(name: str, column: Any, width: int) -> NDArray[Any]:
    if column.null_count:
        raise ConfigError(f"Column {name!r} has {column.null_count} nulls. Call df.dropna() or df.fillna().")
    compute = importlib.import_module("pyarrow.compute")
    rows = len(column)
    if width:
        lengths = compute.unique(compute.list_value_length(column)).to_pylist()
        if lengths not in ([width], []):
            raise ConfigError(
                f"Column {name!r} has arrays of the lengths {', '.join(map(str, sorted(lengths)))}, but every row "
                f"needs {width} values, as the first one has."
            )
        column = compute.list_flatten(column)
        if column.null_count:
            raise ConfigError(f"Column {name!r} has arrays with {column.null_count} nulls in them. Fill them.")
    array = cast_array(column.to_numpy())
    return array.reshape(rows, width) if width else array


def cast_array(array: NDArray[Any]) -> NDArray[Any]:
    """Cast an array to a dtype that models accept: int64 for integers, float32 for all others."""
    return np.ascontiguousarray(array, np.int64 if array.dtype.kind in "iu" else np.float32)
