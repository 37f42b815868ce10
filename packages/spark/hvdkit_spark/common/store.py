"""The store of an estimator: a folder for Parquet files and checkpoints that all executors can read and write."""

from __future__ import annotations

from typing import Any

import fsspec

from hvdkit.errors import ConfigError

_DBFS = ("dbfs:/", "/dbfs/")


class Store:
    """A folder on any file system that fsspec knows: a path, or a URL such as hdfs://, s3a://, gs:// and abfs://.

    prefix_path: the folder.
    train_path, val_path, test_path, runs_path: folders to use in place of those below prefix_path.
    save_runs: keep checkpoints?
    storage_options: options of fsspec for this file system. Spark has its own options.
    Raises ConfigError for a URL whose file system is not installed.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.prefix_path, self._options = self.get_full_path(prefix_path).rstrip("/"), dict(storage_options or {})
        self._train_path = self._place(train_path, "intermediate_train_data")
        self._val_path = self._place(val_path, "intermediate_val_data")
        self._test_path = self._place(test_path, "intermediate_test_data")
        self._runs_path = self._place(runs_path, "runs")
        self._save_runs = save_runs
        _ = self.fs

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Make the store of a path or URL."""
        kind = DBFSLocalStore if prefix_path.startswith(_DBFS) else Store
        return kind(prefix_path, *args, **kwargs)

    def _place(self, path: str | None, name: str) -> str:
        return self.get_full_path(path).rstrip("/") if path else f"{self.prefix_path}/{name}"

    @property
    def fs(self) -> Any:
        """The file system, an object of fsspec."""
        try:
            return fsspec.core.url_to_fs(self.get_localized_path(self.prefix_path), **self._options)[0]
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"The store {self.prefix_path} cannot be opened: {error}") from error

    def get_full_path(self, path: str) -> str:
        """Return the path in Spark's form: a URL."""
        return path if "://" in path else fsspec.core.url_to_fs(path)[0].unstrip_protocol(path)

    def get_localized_path(self, path: str) -> str:
        """Return the path in fsspec's form."""
        return path

    def get_train_data_path(self, idx: object = None) -> str:
        """Return the folder of the Parquet files of training. idx: index of the data set, if there are several."""
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: object = None) -> str:
        """Return the folder of the Parquet files of validation."""
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: object = None) -> str:
        """Return the folder of the Parquet files of a test, which hvdkit does not use."""
        return _numbered(self._test_path, idx)

    def saving_runs(self) -> bool:
        """Are checkpoints kept?"""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return f"{self._runs_path}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of a run's checkpoints."""
        return f"{self.get_run_path(run_id)}/checkpoint"

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of the logs of a run, which hvdkit does not write."""
        return f"{self.get_run_path(run_id)}/logs"

    def exists(self, path: str) -> bool:
        """Does this file or folder exist?"""
        return bool(self.fs.exists(self.get_localized_path(path)))

    def list(self, path: str) -> list[str]:
        """List the names in a folder, sorted; empty if the folder does not exist."""
        if not self.exists(path):
            return []
        found = self.fs.ls(self.get_localized_path(path), detail=False, refresh=True)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def open(self, path: str) -> Any:
        """Open a file to read."""
        return self.fs.open(self.get_localized_path(path), "rb")

    def read(self, path: str) -> bytes:
        """Read a file; returns its contents."""
        with self.open(path) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and make the folders above it."""
        place = self.get_localized_path(path)
        self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        with self.fs.open(place, "wb") as file:
            file.write(data)

    def write_text(self, path: str, text: str) -> None:
        """Write a text file."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a file or folder; harmless if it does not exist."""
        if self.exists(path):
            self.fs.rm(self.get_localized_path(path), recursive=True)


def _numbered(path: str, idx: object) -> str:
    return path if idx is None else f"{path}.{idx}"


class FilesystemStore(Store):
    """Horovod's name for a store on any file system."""


class LocalStore(FilesystemStore):
    """Horovod's name for a store in a folder that all executors see, such as a folder of NFS."""


class HDFSStore(Store):
    """Horovod's name for a store at hdfs://HOST:PORT/PATH, which fsspec reads by pyarrow and libhdfs."""


class DBFSLocalStore(Store):
    """A store on Databricks' file system, which Spark reads as dbfs:/PATH and Python as /dbfs/PATH."""

    def get_full_path(self, path: str) -> str:
        """See Store.get_full_path."""
        return f"dbfs:/{path.removeprefix('/dbfs/')}" if path.startswith("/dbfs/") else path

    def get_localized_path(self, path: str) -> str:
        """See Store.get_localized_path."""
        return f"/dbfs/{path.removeprefix('dbfs:').lstrip('/')}" if path.startswith("dbfs:/") else path
