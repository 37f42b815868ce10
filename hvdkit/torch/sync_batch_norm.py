"""Batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from hvdkit.engine import basics
from hvdkit.engine.reduce_op import Sum
from hvdkit.torch.reduce import allreduce


class SyncBatchNorm(_BatchNorm):
    """Normalize as torch.nn.BatchNorm*d would, given the batches of all ranks as one.

    Forward and backward exchange two numbers per channel, once each, so every rank takes part in both; the ranks may
    have different numbers of samples, also none. Gradients of weight and bias are this rank's share of the whole, as
    with every other layer; those of the input are complete. With one rank, and in evaluation with running statistics,
    nothing is exchanged; in evaluation without them ranks exchange as in training, as in Horovod.

    Arguments as for torch.nn.BatchNorm1d. Input: (n, channels, ...) on CPU or GPU (Horovod's needs CUDA); float16 and
    bfloat16 are normalized in float32. Differentiable once. The running variance is the unbiased variance of all
    samples; momentum=None averages over all batches so far. Raises ValueError, on every rank, if all ranks together
    have at most one value per channel, and for one-dimensional inputs; NotInitializedError before init().
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace every batch normalization inside `module`, and `module` itself if it is one; returns the result.

        Parameters, buffers and mode are kept: an optimizer's references to the tensors stay valid.
        Raises ValueError for a lazy layer that has not had its first batch.
        """
        if isinstance(module, _LazyNormBase):
            raise ValueError(
                f"convert_sync_batchnorm(): {type(module).__name__} does not know its number of channels before the "
                f"first batch. Pass one batch through the model, then convert it."
            )
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            made = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var = module.running_mean, module.running_var
            made.num_batches_tracked = module.num_batches_tracked
            return made.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: the input must have 2 or more dimensions, (n, channels, ...); its shape is "
                f"{tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, keeping its shape and dtype; collective in training."""
        self._check_input_dim(input)
        tracked = self.track_running_stats and self.running_mean is not None and self.running_var is not None
        if (tracked and not self.training) or basics.size() == 1:
            return super().forward(input)
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
        made = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if tracked and self.training:
            self._track(*made[1:])
        return made[0]

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        assert share is not None, "a module that tracks statistics counts its batches"
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(variance + eps) + bias, with mean and variance of x on all ranks.

    With s = 1 / sqrt(variance + eps), <> the mean over all ranks' samples and dy the gradient of y:
    dx = weight s (dy - <dy> - (x - mean) s^2 <dy (x - mean)>).
    """

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        x = _widen(given)
        mean, variance, count = _statistics(x)
        ctx.save_for_backward(given, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.bias_dtype = count, None if bias is None else bias.dtype
        weight, bias = (None if one is None else one.to(x.dtype) for one in (weight, bias))
        y = F.batch_norm(x, mean.to(x.dtype), variance.to(x.dtype), weight, bias, eps=eps)
        ctx.mark_non_differentiable(mean, variance)
        return y.to(given.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        given, weight, mean, scale = ctx.saved_tensors
        dy, x = _widen(grads[0]), _widen(given)
        centered = x - _along_channels(mean.to(x.dtype), x)
        others = _all_but_channels(x)
        sums = torch.stack([dy.sum(others).double(), (dy * centered).sum(others).double()])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            mean_dy, mean_product = allreduce(sums, op=Sum) / ctx.count
            dx = dy - _along_channels(mean_dy.to(x.dtype), x)
            dx -= centered.mul_(_along_channels((mean_product * scale * scale).to(x.dtype), x))
            dx *= _along_channels((scale if weight is None else scale * weight).to(x.dtype), x)
            dx = dx.to(given.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = (sums[1] * scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sums[0].to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def _statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and variance (divided by n) per channel over all ranks, (channels,) float64, and n; collective."""
    count = x.numel() // x.size(1) if x.size(1) else 0
    sums = torch.zeros(2 * x.size(1) + 1, dtype=torch.float64, device=x.device)
    if count:
        variance, mean = (one.double() for one in torch.var_mean(x, _all_but_channels(x), correction=0))
        sums = torch.cat([mean * count, (variance + mean * mean) * count, sums.new_tensor([count])])
    total = allreduce(sums, op=Sum)
    all_count = int(total[-1])
    if all_count <= 1:
        raise ValueError(
            f"SyncBatchNorm: training needs more than one value per channel. All ranks together have {all_count}; the "
            f"input of this rank has shape {tuple(x.shape)}. Use larger batches, or model.eval()."
        )
    mean, square = (total[:-1] / all_count).chunk(2)
    return mean, (square - mean * mean).clamp_(min=0), all_count


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape (channels,) to broadcast with x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
