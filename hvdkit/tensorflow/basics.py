"""init, describe and the like, for TensorFlow scripts."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.engine.basics import Framework
from hvdkit.engine.cores import count_cores
from hvdkit.engine.observe.recording import RECORDER
from hvdkit.tensorflow.arithmetic import TensorflowArithmetic
from hvdkit.tensorflow.loading import watch_datasets
from hvdkit.transport.nccl import opened_version

RECORDER.when_on(watch_datasets)


def _count_threads() -> int:
    return tf.config.threading.get_intra_op_parallelism_threads() or count_cores()


FRAMEWORK = Framework(
    name="tensorflow",
    label=f"tensorflow {tf.__version__}",
    arithmetic=TensorflowArithmetic,
    count_threads=_count_threads,
    cuda=bool(tf.test.is_built_with_cuda()),
    rocm=bool(tf.test.is_built_with_rocm()),
    nccl=opened_version,
)
init, describe = FRAMEWORK.init, FRAMEWORK.describe
cuda_built, rocm_built = FRAMEWORK.cuda_built, FRAMEWORK.rocm_built


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU. verbose: accepted, as in Horovod.

    Raises ValueError for another framework's name.
    """
    if ext_base_name != "tensorflow":
        raise ValueError(
            f"hvdkit.tensorflow's gpu_available({ext_base_name!r}): it is for 'tensorflow'. Use "
            f"hvdkit.common.util.gpu_available({ext_base_name!r})."
        )
    return bool(tf.config.list_physical_devices("GPU"))
