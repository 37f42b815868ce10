"""Train digits with Lightning on all ranks of the job: `hvdrun -np 2 python FILE`."""

import argparse
import sys
import tempfile
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdkit.lightning  # hvd: makes strategy="hvdkit" known
import hvdkit.torch as hvd  # hvd


class Digits(lightning.LightningModule):
    """A network of two layers; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """The share of images that are recognised."""
        images, labels = batch
        right = (self.model(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main(args: argparse.Namespace) -> int:
    """Train, validate, and return the exit code."""
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train, test = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as temporary:
        hvd.init()  # hvd
        place = Path(args.csv or temporary + "/run.csv")
        logger = hvdkit.lightning.HvdkitLogger(csv=place)  # hvd: averages of ranks
        trainer = lightning.Trainer(
            strategy="hvdkit",  # hvd: all ranks of the job, from any launcher
            accelerator="cpu",
            max_epochs=args.epochs,
            logger=logger,
            log_every_n_steps=5,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Digits()
        trainer.fit(module, DataLoader(train, 32, shuffle=True), DataLoader(test, 64))
        accuracy = float(trainer.callback_metrics["accuracy"])
    if hvd.rank() == 0:  # hvd
        print(f"{trainer.world_size} ranks, test accuracy {accuracy:.2%}")
    return int(accuracy < args.min_accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--csv", default="", help="file for the averages; a temporary one if empty")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this test accuracy")
    if code := main(parser.parse_args()):
        sys.exit(code)
