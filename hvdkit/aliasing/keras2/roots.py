"""Under which names a script may have Keras: they are three modules, most of whose parts are the same."""

#: The last one is what `import tensorflow.keras` gives, and the one before what `tf.keras` is.
ROOTS = ("keras", "keras._tf_keras.keras", "tensorflow.keras")
