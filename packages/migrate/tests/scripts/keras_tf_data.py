"""Trap: a tf.data.Dataset that every rank would shuffle otherwise; fit in one line with compile's."""
import numpy as np
import tensorflow as tf

x = np.random.RandomState(0).rand(96, 3).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).shuffle(96).batch(8)
inputs = tf.keras.Input((3,))
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
model.compile(tf.keras.optimizers.Adam(), "mse")
model.fit(data, epochs=4, callbacks=[
    tf.keras.callbacks.TensorBoard("logs"),
], verbose=0)
final = float(model.evaluate(x, x.sum(1), verbose=0))
