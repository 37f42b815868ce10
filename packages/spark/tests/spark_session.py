"""A real Spark on this machine: a master, a worker and executors of one core each, in processes of their own."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SUPPORT = ROOT / "tests" / "support"
#: Of the executors: hvdkit, the packages and the tests.
PATH = [SUPPORT / "quick_start", ROOT, SUPPORT, *sorted(ROOT.glob("packages/*")), HERE]
_OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.showConsoleProgress": "false",
}


@contextlib.contextmanager
def local_spark(master: str = "local-cluster[2,1,1024]") -> Iterator[Any]:
    """A SparkSession whose executors find hvdkit, the tests, and no TensorFlow. Nothing is left of it."""
    pyspark: Any = importlib.import_module("pyspark")
    home = Path(pyspark.__file__).parent
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="spark-") as folder:
        hidden = Path(folder, "hidden", "tensorflow.py")
        hidden.parent.mkdir()
        hidden.write_text("raise ImportError('hidden by the tests')\n")
        path = os.pathsep.join(map(str, [*PATH, hidden.parent]))
        os.environ.update(SPARK_HOME=str(home), SPARK_LOCAL_DIRS=folder, PYSPARK_PYTHON=sys.executable)
        os.environ["PYTHONPATH"] = path  # of a master such as local[2]
        builder = pyspark.sql.SparkSession.builder.master(master).appName("tests")
        for name, value in {**_OPTIONS, "spark.executorEnv.PYTHONPATH": path}.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        work = home / "work" / spark.sparkContext.applicationId  # the output of executors
        try:
            yield spark
        finally:
            spark.stop()
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                work.parent.rmdir()
            os.environ.clear()
            os.environ.update(before)
