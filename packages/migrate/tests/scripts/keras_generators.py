"""Trap: generators and pictures that are changed at random."""
import keras
import numpy as np
from keras.preprocessing.image import ImageDataGenerator


def batches(x, y):
    while True:
        i = np.random.randint(0, len(x) - 8)
        yield x[i:i + 8], y[i:i + 8]


x, y = np.zeros((64, 8, 8, 1)), np.zeros(64)
model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit_generator(batches(x, y), steps_per_epoch=8, epochs=2, workers=2)
flow = ImageDataGenerator(horizontal_flip=True).flow(x, y, batch_size=8)
model.fit_generator(generator=flow, steps_per_epoch=len(x) / 8, nb_epoch=1, max_queue_size=10, workers=2)
