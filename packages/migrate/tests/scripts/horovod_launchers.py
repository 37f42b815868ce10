"""Trap: parts of Horovod that start processes."""
import horovod
import horovod.spark
import horovod.torch as hvd
from horovod.spark.keras import KerasEstimator
from horovod.torch import nothing_like_this


def train():
    hvd.init()
    return hvd.rank(), hvd.not_there()


horovod.run(train, np=2)
horovod.spark.run(train)
