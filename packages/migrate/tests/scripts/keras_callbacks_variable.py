"""Trap: optimizer and callbacks are variables, in a function."""
import keras
import numpy as np
from keras import layers
from sklearn.model_selection import train_test_split


def build():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])


def main():
    x = np.random.RandomState(0).rand(120, 3).astype("float32")
    train, test = train_test_split(x, test_size=.2)
    model = build()
    optimizer = keras.optimizers.SGD(learning_rate=0.01, momentum=0.9)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    callbacks = [
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.EarlyStopping(patience=3),  # stops early
        keras.callbacks.ReduceLROnPlateau(),
    ]
    model.fit(train, train.sum(1), epochs=3, batch_size=8, callbacks=callbacks, verbose=0,
              validation_data=(test, test.sum(1)))
    return model, float(model.evaluate(x, x.sum(1), verbose=0)[0])


if __name__ == "__main__":
    model, final = main()
