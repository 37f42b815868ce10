"""Train in 16 bits with gradients that are added up over several small batches and clipped; see the README here."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import hvdkit.torch as hvd  # hvd


def read_digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Split 1797 images of 8 x 8 pixels into 1437 to train on and 360 to test with, always the same."""
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    return random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))


def main(args: argparse.Namespace) -> None:
    """Train and test."""
    hvd.init()  # hvd
    device = hvd.local_device()  # hvd
    torch.set_num_threads(1)  # hvd: the ranks of a host share its cores, and the network is small
    torch.manual_seed(args.seed)
    train, test = read_digits()
    sampler = hvd.data.ShardedSampler(train, seed=args.seed)  # hvd
    batches = DataLoader(train, args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(  # hvd
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,  # hvd: reduces once a window, and what there is of the last window
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvd
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # hvd
    # float16 wants its loss scaled; CPUs have bfloat16, which does not.
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # hvd
        mean_loss = hvd.metrics.Mean("loss")  # hvd
        for number, (images, labels) in enumerate(batches, 1):
            with torch.autocast(device.type, half):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss / args.accumulate).backward()
            mean_loss.update(loss, len(labels))
            if number % args.accumulate == 0 or number == len(batches):
                scaler.unscale_(optimizer)  # these are the gradients of all ranks already, so the norm is right
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        average = mean_loss.compute()  # hvd
        if hvd.rank() == 0:  # hvd
            print(f"epoch {epoch + 1}  loss {average:.4f}")

    model.eval()
    mean_accuracy = hvd.metrics.Mean("accuracy")  # hvd
    for images, labels in DataLoader(test, 256, sampler=hvd.data.ShardedSampler(test, evaluation=True)):  # hvd
        mean_accuracy.update((model(images.to(device)).argmax(dim=1).cpu() == labels).double().mean(), len(labels))
    accuracy = mean_accuracy.compute()  # hvd
    if hvd.rank() == 0:  # hvd
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one rank")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a step")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="longest gradient")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the shuffling")
    main(parser.parse_args())
