"""tf.data service under hvdrun, with Horovod's names: another job preprocesses the data that ranks train on."""

from hvdkit.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]
