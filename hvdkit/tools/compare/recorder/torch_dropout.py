"""Dropout off: ranks and one process draw different neurons, so that nothing could be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdkit.tools.compare.recorder.patches import Patches
from hvdkit.tools.compare.recorder.session import Session

_NAMES = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


def switch_off_dropout(session: Session, patches: Patches) -> None:
    """Let the functions of dropout, those of modules and attention among them, change nothing."""
    for name in _NAMES:
        patches.put(functional, name, _identity(session, getattr(functional, name)))
    attention = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **others: Any
    ) -> Any:
        session.record.dropout |= dropout_p > 0
        return attention(query, key, value, attn_mask, 0.0, *rest, **others)

    patches.put(functional, "scaled_dot_product_attention", scaled_dot_product_attention)

    def before_forward(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.RNNBase) and module.dropout:
            module.dropout, session.record.dropout = 0.0, True

    patches.callback(torch.nn.modules.module.register_module_forward_pre_hook(before_forward).remove)


def _identity(session: Session, own: Any) -> Any:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        session.record.dropout |= training and p > 0
        return input

    dropout.__name__, dropout.__doc__ = own.__name__, own.__doc__
    return dropout
