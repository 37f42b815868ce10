"""Saving and loading of estimators and models in Spark's metadata: as JSON where that is possible, else pickled."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any, Generic, TypeVar

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from hvdkit_spark.common.params import NamedParams

_OBJECTS = "hvdkit_objects"


class Saved(NamedParams, MLWritable, MLReadable[Any]):
    """Mixin with `write().save(path)` and `load(path)`. Loading executes what is saved, as it is a pickle."""

    def write(self) -> MLWriter:
        """Return the writer, as in pyspark.ml: .overwrite().save(path)."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader, as in pyspark.ml."""
        return _Reader(cls)

    @classmethod
    def dump_objects(cls, objects: dict[str, Any]) -> bytes:
        """Pickle the parameters that are not JSON, in one pickle, so that an optimizer keeps its model's tensors."""
        return bytes(cloudpickle.dumps(objects))

    @classmethod
    def load_objects(cls, data: bytes) -> dict[str, Any]:
        """Load the parameters that dump_objects() has written."""
        found: dict[str, Any] = pickle.loads(data)
        return found


class _Writer(MLWriter):
    def __init__(self, instance: Saved) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        values = {param.name: value for param, value in self._instance._paramMap.items()}
        objects = {name: value for name, value in values.items() if not _is_json(value)}
        data = base64.b64encode(self._instance.dump_objects(objects)).decode()
        plain = {name: value for name, value in values.items() if name not in objects}
        DefaultParamsWriter.saveMetadata(self._instance, path, self.sc, {_OBJECTS: data}, plain)


Kind = TypeVar("Kind", bound=Saved)


class _Reader(MLReader[Kind], Generic[Kind]):
    def __init__(self, kind: type[Kind]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Kind:
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        instance = self._kind()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        instance._set(**self._kind.load_objects(base64.b64decode(metadata[_OBJECTS])))
        return instance


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
