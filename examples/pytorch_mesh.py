"""Train with torch's own parallel parts on hvdkit's transports: FSDP2 between rows of a mesh, layers divided inside.

On 4 ranks `--parts 2` makes 2 x 2: each layer is divided in two, and each half's parameters are kept in two shards.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd: makes the backend "hvdkit" known


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    dist.init_process_group("hvdkit")  # hvd: the ranks of hvdrun, mpirun or srun
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores
    torch.manual_seed(args.seed)
    shape = (dist.get_world_size() // args.parts, args.parts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "layer"))  # hvd: rows across, columns along
    rows = mesh["data"]

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    parallelize_module(model, mesh["layer"], {"0": ColwiseParallel(), "2": RowwiseParallel()})  # hvd
    fully_shard(model, mesh=rows)  # hvd
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train, rank=rows.get_local_rank(), size=rows.size(), seed=args.seed)  # hvd
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # hvd
        for images, labels in DataLoader(train, args.batch_size, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {loss:.4f}")

    images, labels = next(iter(DataLoader(test, len(test))))
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).double().mean()
    if dist.get_rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")
    dist.destroy_process_group()  # hvd


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one row of the mesh")
    parser.add_argument("--parts", type=int, default=1, help="parts that each layer is divided into")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
