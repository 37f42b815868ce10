"""Trap: Keras 2, for one process."""
import keras
import numpy as np
from keras import backend as K
from keras.callbacks import ModelCheckpoint
from keras.layers.convolutional import Conv2D
from keras.optimizers import SGD
from keras.utils import np_utils

x = np.random.RandomState(0).rand(64, 6, 6, 1).astype("float32")
y = np_utils.to_categorical(np.arange(64) % 2, 2)
model = keras.Sequential([Conv2D(2, 3, input_shape=(6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(2)])
opt = SGD(lr=1e-2, decay=0., nesterov=True, momentum=.9)
model.compile(loss="mse", optimizer=opt, experimental_run_tf_function=False, metrics=["accuracy"])
checkpoint = ModelCheckpoint("weights.{epoch:02d}.hdf5", save_weights_only=True, period=1)
model.fit(x, y, batch_size=8, epochs=2, callbacks=[checkpoint], verbose=0)
K.set_value(model.optimizer.lr, K.get_value(model.optimizer.lr) * .1)
model.save_weights("last.h5")
model.load_weights("last.h5")
final = float(model.evaluate(x, y, verbose=0)[0])
