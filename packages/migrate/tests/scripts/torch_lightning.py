"""Trap: somebody else's training loop."""
import pytorch_lightning as pl
import torch

trainer = pl.Trainer(max_epochs=3, gpus=1)
trainer.fit(torch.nn.Linear(2, 1))
