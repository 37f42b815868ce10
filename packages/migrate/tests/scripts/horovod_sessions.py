"""Trap: TensorFlow 1."""
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())
opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.001 * hvd.size()))
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
with tf.train.MonitoredTrainingSession(config=config, hooks=hooks) as session:
    session.run(hvd.broadcast_global_variables(0))
