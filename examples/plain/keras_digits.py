"""Train a small network on handwritten digits, with KERAS_BACKEND=tensorflow, torch or jax."""

import argparse
from typing import Any

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def read_digits() -> Any:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=360, random_state=0)


def make_model() -> keras.Model:
    """Two convolutions and two dense layers, about 150,000 parameters."""
    convolutions = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 64)]
    pooled = [layers.MaxPooling2D(), layers.Dropout(0.4), layers.Flatten()]
    dense = [layers.Dense(128, activation="relu"), layers.Dropout(0.4), layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *convolutions, *pooled, *dense])


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    keras.utils.set_random_seed(args.seed)
    images, test_images, labels, test_labels = read_digits()
    model = make_model()
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [keras.callbacks.ModelCheckpoint(args.checkpoint)] if args.checkpoint else []
    model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=2, callbacks=callbacks)
    accuracy = model.evaluate(test_images, test_labels, batch_size=256, verbose=0, return_dict=True)["accuracy"]
    print(f"test accuracy {accuracy:.2%} of {len(test_images)} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a batch")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate")
    parser.add_argument("--checkpoint", default="", help="file that is written after each epoch; none if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
