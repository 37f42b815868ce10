"""Trap: the optimizer is a word, and there are no callbacks."""
import numpy as np
from tensorflow.keras.layers import Dense, Input
from tensorflow.keras.models import Sequential

rng = np.random.RandomState(0)
x = rng.rand(96, 3).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = Sequential([Input((3,)), Dense(8, activation="relu"), Dense(1)])
model.compile(optimizer='adam', loss="mse")
model.fit(x, y, epochs=5, batch_size=8,
          validation_data=(x[:30], y[:30]), verbose=2)
final = float(model.evaluate(x, y, verbose=0))
print("loss", final)
model.save("model.keras")
