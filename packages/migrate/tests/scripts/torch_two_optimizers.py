"""Trap: two models, two optimizers, made in one line; a list of losses over the epochs."""
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
real = torch.randn(192, 2) * .5 + 2


def main(epochs=4):
    loader = DataLoader(TensorDataset(real), batch_size=16, shuffle=True, num_workers=0)
    G, D = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    opt_g, opt_d = optim.Adam(G.parameters(), lr=1e-2, betas=(.5, .99)), optim.Adam(D.parameters(), lr=1e-3)
    judge = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        for (batch,) in loader:
            fake = G(torch.randn_like(batch))
            opt_d.zero_grad()
            (judge(D(batch), torch.ones(len(batch), 1)) + judge(D(fake.detach()), torch.zeros(len(batch), 1))).backward()
            opt_d.step()
            opt_g.zero_grad()
            judge(D(fake), torch.ones(len(batch), 1)).backward()
            opt_g.step()
        if epoch % 2 == 0: print("epoch", epoch)
    return nn.ModuleList([G, D]), 0.0


if __name__ == "__main__":
    model, final = main()
