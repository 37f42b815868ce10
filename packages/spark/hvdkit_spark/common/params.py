"""The parameters of estimators and of the models that they return, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from hvdkit.errors import ConfigError

_int, _text, _texts, _bool = (
    TypeConverters.toInt,
    TypeConverters.toString,
    TypeConverters.toListString,
    TypeConverters.toBoolean,
)


class Definition(NamedTuple):
    """A parameter. convert: function that converts values to its type; None leaves values as they are."""

    name: str
    doc: str
    convert: Callable[[Any], Any] | None = None
    default: Any = None


ESTIMATOR = (
    Definition("num_proc", "number of ranks; None for as many as tasks run at the same time", _int),
    Definition("backend", "runs the ranks, in place of num_proc"),
    Definition("store", "folder of Parquet files and checkpoints"),
    Definition("model", "model to train"),
    Definition("optimizer", "optimizer, which is wrapped by DistributedOptimizer on the ranks"),
    Definition("loss", "loss, or a list with one for each output"),
    Definition("loss_weights", "weight of each loss", TypeConverters.toListFloat),
    Definition("metrics", "metrics"),
    Definition("gradient_compression", "compression of DistributedOptimizer"),
    Definition("backward_passes_per_step", "batches whose gradients make one step", _int, 1),
    Definition("sample_weight_col", "column with the weight of each row", _text),
    Definition("feature_cols", "columns of the model's inputs, one each", _texts),
    Definition("label_cols", "columns of the labels, one for each output", _texts),
    Definition("input_shapes", "shape of each input, with -1 for the rows"),
    Definition("label_shapes", "shape of each label, with -1 for the rows"),
    Definition("validation", "part of the rows for validation, or the column that marks them"),
    Definition("batch_size", "rows of a batch on each rank", _int, 32),
    Definition("val_batch_size", "rows of a batch of validation; None for batch_size", _int),
    Definition("epochs", "number of epochs", _int, 1),
    Definition("train_steps_per_epoch", "steps of an epoch; None for all rows", _int),
    Definition("validation_steps_per_epoch", "batches of validation on each rank; None for all rows", _int),
    Definition("shuffle", "shuffle the rows in each epoch?", _bool, True),
    Definition("shuffle_buffer_size", "rows that a rank reads before it shuffles them", _int, 100_000),
    Definition("inmemory_cache_all", "keep the rows of a rank in its memory?", _bool, False),
    Definition("partitions_per_process", "Parquet files for each rank", _int, 4),
    Definition("random_seed", "seed of the framework, of the shuffling and of the rows of validation", _int, 0),
    Definition("run_id", "name of the run in the store; its last checkpoint is continued", _text),
    Definition("use_gpu", "use GPUs? False hides those of the executors", _bool, True),
    Definition("mp_start_method", "Horovod's; has no effect, as no process is started for the data", _text),
    Definition("reader_pool_type", "Horovod's; has no effect, as no process is started for the data", _text),
    Definition("train_reader_num_workers", "Horovod's; has no effect, see reader_pool_type", _int),
    Definition("val_reader_num_workers", "Horovod's; has no effect, see reader_pool_type", _int),
    Definition("verbose", "0 or 1: a line for each epoch in the log of rank 0's executor", _int, 1),
)

MODEL = (
    Definition("model", "trained model"),
    Definition("history", "name -> value of each epoch"),
    Definition("run_id", "name of the run in the store", _text),
    Definition("feature_columns", "columns of the model's inputs", _texts),
    Definition("label_columns", "columns of the labels", _texts),
    Definition("output_cols", "columns that transform() adds, one for each output", _texts),
    Definition("input_shapes", "shape of each input, with -1 for the rows"),
    Definition("output_widths", "numbers that the model returns for a row, by output"),
    Definition("batch_size", "rows of a batch in transform()", _int, 1024),
)

#: Horovod's parameters that hvdkit does not have -> the reason.
REFUSED = {
    **dict.fromkeys(
        (
            "data_module transformation_fn transformation_edit_fields transformation_removed_fields "
            "compress_sparse_cols"
        ).split(),
        "it belongs to Petastorm, which hvdkit does not use; transform the DataFrame before fit()",
    ),
    **dict.fromkeys(("continuous_cols", "categorical_cols"), "list all columns in feature_cols"),
    **dict.fromkeys(("loss_constructors",), "functions and modules are pickled by value: pass them as loss"),
    **dict.fromkeys(("train_minibatch_fn",), "write the loop as a function, and start it by hvdkit_spark.run()"),
    **dict.fromkeys(("checkpoint_callback",), "the store keeps the last epoch of each run; pass others as callbacks"),
    **dict.fromkeys(("backend_env",), "pass backend=SparkBackend(num_proc, env=...)"),
}

Kind = TypeVar("Kind", bound=type[Params])


def with_params(*definitions: Definition) -> Callable[[Kind], Kind]:
    """Give a class parameters, each with its `setName(value)` and `getName()`."""

    def add(kind: Kind) -> Kind:
        defaults = {**getattr(kind, "hvdkit_defaults", {}), **{each.name: each.default for each in definitions}}
        kind.hvdkit_defaults = defaults
        for each in definitions:
            convert = {} if each.convert is None else {"typeConverter": _optional(each.convert)}
            setattr(kind, each.name, Param(Params._dummy(), each.name, each.doc, **convert))
            name = "".join(word.capitalize() for word in each.name.split("_"))
            setattr(kind, f"set{name}", _setter(each.name))
            setattr(kind, f"get{name}", _getter(each.name))
        return kind

    return add


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _setter(name: str) -> Callable[[Any, Any], Any]:
    def set_value(self: Any, value: Any) -> Any:
        return self._set(**{name: value})

    set_value.__doc__ = f"Set {name}."
    return set_value


def _getter(name: str) -> Callable[[Any], Any]:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(name)

    get_value.__doc__ = f"Get {name}."
    return get_value


class NamedParams(Params):
    """Parameters that are set by name: in the constructor, by setParams() and by a setter for each."""

    hvdkit_defaults: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(**self.hvdkit_defaults)
        self.setParams(**values)

    def setParams(self, **values: Any) -> Any:
        """Set parameters by name; None leaves a parameter as it is. Raises ConfigError for an unknown parameter."""
        given = {name: value for name, value in values.items() if value is not None}
        for name in given:
            if name not in self.hvdkit_defaults:
                known = ", ".join(sorted(self.hvdkit_defaults))
                why = REFUSED.get(name, f"there are {known}")
                raise ConfigError(f"{type(self).__name__}: there is no parameter {name}: {why}.")
        return self._set(**given)
