"""Trap: Keras 2, as Horovod's examples have it."""
import keras
import numpy as np
from keras import backend as K
from keras.layers.core import Dense
from keras.models import Sequential
import horovod.keras as hvd

hvd.init()
np.random.seed(0)
x = np.random.rand(64, 3).astype("float32")
y = x.sum(axis=1, keepdims=True)

model = Sequential()
model.add(Dense(1, input_shape=(3,)))
opt = keras.optimizers.Adam(lr=0.01 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="mse", optimizer=opt,
              experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint('./checkpoint-{epoch}.h5'))


def batches():
    while True:
        yield x[hvd.rank()::hvd.size()], y[hvd.rank()::hvd.size()]


model.fit_generator(batches(),
                    steps_per_epoch=4, epochs=2, workers=4, callbacks=callbacks,
                    use_multiprocessing=False, verbose=1 if hvd.rank() == 0 else 0)
rate, count = K.get_value(model.optimizer.lr), len(model.optimizer.variables())
if hvd.rank() == 0:
    print("rate", rate, count)
final = float(model.evaluate(x, y, verbose=0))
