"""Trap: learning rates that something else sets, and an optimizer from a function of another file."""
import keras
import numpy as np
from mine import make_optimizer

x = np.zeros((64, 3))
rate = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=100, decay_rate=0.9)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(rate), loss="mse")
model.fit(x, x[:, 0], callbacks=keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)))
model.compile(optimizer=make_optimizer(), loss="mse")
model.fit(x, x[:, 0], steps_per_epoch=8)
for _ in range(3):
    model.train_on_batch(x, x[:, 0])
