"""The names under which a script can import Keras: three modules that share most of their submodules."""

#: The last module is that of `import tensorflow.keras`, the second that of `tf.keras`.
ROOTS = ("keras", "keras._tf_keras.keras", "tensorflow.keras")
