"""Training that can be taken up again: `hvd.elastic.TorchState`, `hvd.elastic.ElasticSampler` and `hvd.elastic.run`.

Worlds shrink and grow where Horovod's core is the engine, under `horovodrun --min-np`. In a world of hvdkit's own
engine, which stays as it is for now, all of them do what Horovod's do there.
"""

from __future__ import annotations

from hvdkit.elastic.run import run
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
