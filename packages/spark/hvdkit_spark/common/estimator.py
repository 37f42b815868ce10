"""The estimator base class: it trains a model on ranks from a DataFrame, which is written to Parquet files."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from hvdkit.errors import ConfigError, HorovodInternalError
from hvdkit.integrations.ranks import plan_hidden_gpus
from hvdkit_spark.common.backend import Backend, SparkBackend
from hvdkit_spark.common.dataset import read_dataset
from hvdkit_spark.common.model import HorovodModel
from hvdkit_spark.common.params import ESTIMATOR, with_params
from hvdkit_spark.common.persistence import Saved
from hvdkit_spark.common.prepare import write_data
from hvdkit_spark.common.store import Store
from hvdkit_spark.common.training import Shapes, Trained, Training, check_shapes

_REQUIRED = ("model", "store", "feature_cols", "label_cols")
_POSITIVE = ("batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch")


@with_params(*ESTIMATOR)
class HorovodEstimator(Estimator[Any], Saved):
    """An estimator of pyspark.ml; see KerasEstimator and TorchEstimator. A subclass defines the next three methods."""

    def _check_framework(self) -> None:
        """Raise ConfigError for parameters that its framework cannot use."""
        raise NotImplementedError

    def _plan_ranks(self) -> tuple[Callable[[Training, bytes], Trained | None], bytes, dict[str, str]]:
        """Return the function of the ranks, its second argument, and the ranks' variables.

        The function returns a result on rank 0.
        """
        raise NotImplementedError

    def _create_model(self, trained: Trained, **params: Any) -> HorovodModel:
        """Make the model with trained parameters. params: parameters of the model that all frameworks share."""
        raise NotImplementedError

    def _input_shapes(self) -> Shapes | None:
        """Return the shape of each input, with -1 for the rows; None for arrays as they are."""
        shapes: Shapes | None = self.getOrDefault("input_shapes")
        return shapes

    def _fit(self, dataset: DataFrame) -> HorovodModel:
        backend = self._check()
        store: Store = self.getOrDefault("store")
        index = uuid.uuid4().hex[:12]
        partitions = backend.num_processes() * self.getOrDefault("partitions_per_process")
        validation, seed = self.getOrDefault("validation"), self.getOrDefault("random_seed")
        try:
            validates = write_data(dataset, self._columns(), validation, store, index, partitions, seed)
            return self._train(backend, index, validates=validates)
        finally:
            store.remove(store.get_train_data_path(index))
            store.remove(store.get_val_data_path(index))

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: object = None) -> HorovodModel:
        """Train on Parquet files that are in the store already, with numbers, and lists of one length in all rows.

        params: as for fit(). dataset_idx: index of the data set, see Store.get_train_data_path(). If the parameter
        `validation` is set, the model is validated on the files of Store.get_val_data_path().
        """
        estimator = self.copy(params) if params else self
        return estimator._train(estimator._check(), dataset_idx, validates=bool(estimator.getOrDefault("validation")))

    def _columns(self) -> list[str]:
        weight = self.getOrDefault("sample_weight_col")
        columns = [*self.getOrDefault("feature_cols"), *self.getOrDefault("label_cols"), *([weight] if weight else [])]
        return list(dict.fromkeys(columns))

    def _train(self, backend: Backend, index: object, *, validates: bool) -> HorovodModel:
        store: Store = self.getOrDefault("store")
        run_id = self.getOrDefault("run_id") or f"run_{uuid.uuid4().hex[:12]}"
        columns, batch_size = self._columns(), self.getOrDefault("batch_size")
        training = Training(
            store=store,
            run_id=run_id,
            train=read_dataset(store, store.get_train_data_path(index), columns),
            validation=read_dataset(store, store.get_val_data_path(index), columns) if validates else None,
            features=self.getOrDefault("feature_cols"),
            labels=self.getOrDefault("label_cols"),
            weight=self.getOrDefault("sample_weight_col") or "",
            input_shapes=self._input_shapes(),
            label_shapes=self.getOrDefault("label_shapes"),
            batch_size=batch_size,
            val_batch_size=self.getOrDefault("val_batch_size") or batch_size,
            epochs=self.getOrDefault("epochs"),
            train_steps=self.getOrDefault("train_steps_per_epoch"),
            validation_steps=self.getOrDefault("validation_steps_per_epoch"),
            shuffle=self.getOrDefault("shuffle"),
            buffer_rows=self.getOrDefault("shuffle_buffer_size"),
            cache=self.getOrDefault("inmemory_cache_all"),
            seed=self.getOrDefault("random_seed"),
            verbose=self.getOrDefault("verbose"),
        )
        check_shapes(training)
        function, objects, env = self._plan_ranks()
        if not self.getOrDefault("use_gpu"):
            env.update(plan_hidden_gpus())
        trained = next((one for one in backend.run(function, (training, objects), env=env) if one is not None), None)
        if trained is None:
            raise HorovodInternalError("No rank has returned the trained model.")
        return self._create_model(
            trained,
            history=trained.history,
            run_id=run_id,
            feature_columns=training.features,
            label_columns=training.labels,
            output_cols=[f"{label}__output" for label in training.labels],
            input_shapes=training.input_shapes,
            output_widths=trained.output_widths,
        )

    def _check(self) -> Backend:
        """Return the backend. Raises ConfigError for parameters that are missing or contradict each other."""
        name = type(self).__name__
        missing = [param for param in _REQUIRED if not self.getOrDefault(param)]
        if missing:
            raise ConfigError(f"{name} needs the parameters {', '.join(missing)}.")
        if not isinstance(self.getOrDefault("store"), Store):
            raise ConfigError(f"{name}: store must be a Store: Store.create('/shared/folder').")
        for param in _POSITIVE:
            value = self.getOrDefault(param)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {param} is {value}; it must be 1 or more.")
        validation = self.getOrDefault("validation")
        if not (validation is None or isinstance(validation, str) or 0 <= validation < 1):
            raise ConfigError(f"{name}: validation is {validation}; it must be a column, or from 0 to below 1.")
        for shapes, columns in (("input_shapes", "feature_cols"), ("label_shapes", "label_cols")):
            given, there = self.getOrDefault(shapes), self.getOrDefault(columns)
            if given is not None and len(given) != len(there):
                raise ConfigError(f"{name}: {shapes} has {len(given)} shapes for {len(there)} columns of {columns}.")
        backend, num_proc = self.getOrDefault("backend"), self.getOrDefault("num_proc")
        if backend is not None and num_proc is not None:
            raise ConfigError(f"{name}: backend and num_proc are both set. Leave num_proc out.")
        self._check_framework()
        chosen: Backend = backend if backend is not None else SparkBackend(num_proc)
        return chosen
