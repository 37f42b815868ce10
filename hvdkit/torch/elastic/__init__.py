"""Training that can be taken up again: `hvd.elastic.TorchState` and `hvd.elastic.ElasticSampler`.

Both do what Horovod's do in a world that stays as it is. Worlds that shrink and grow are not there yet, and neither is
`run`, which without them would only call the function after `state.sync()`: do that yourself.
"""

from __future__ import annotations

from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState"]
