"""Trap: checkpoints: one is loaded before training, one is written in a function, and read again at the end."""
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def save_checkpoint(state, is_best, filename="checkpoint.pt"):
    torch.save(state, filename)
    if is_best:
        torch.save(state, "best.pt")


def main(folder="checkpoints"):
    torch.manual_seed(0)
    if not os.path.exists(folder):
        os.makedirs(folder)
    x = torch.rand(96, 2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    start = 0
    if os.path.exists("start.pt"):
        checkpoint = torch.load("start.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["epoch"]
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    best = float("inf")
    for epoch in range(start, 3):
        bar = tqdm(loader, leave=False)
        for (a,) in bar:
            optimizer.zero_grad()
            loss = (model(a) - a.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=loss.item())
        save_checkpoint({"model": model.state_dict(), "epoch": epoch}, loss.item() < best)
        best = min(best, loss.item())

    # the best one counts
    model.load_state_dict(torch.load("best.pt")["model"])
    return model, (model(x) - x.sum(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    model, final = main()
