"""The steps of a PyTorch script: losses, gradients, parameters, from torch's hooks for all models and optimizers.

Many ranks also record the batches of their DataLoaders, and one rank gets these batches joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from hvdkit.tools.compare.recorder.session import Patches, Session
from hvdkit.tools.compare.records import Array, Loader, Step, thin

_NUMBER = "_hvdkit_compare_number"


def watch_loaders(session: Session, patches: Patches) -> None:
    """Intercept every iteration of every DataLoader that is made from now on."""
    loaders, numbers = _Loaders(session), count()
    init: Any = DataLoader.__init__
    iterate: Any = DataLoader.__iter__
    length: Any = DataLoader.__len__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.__dict__[_NUMBER] = next(numbers)

    def __iter__(self: Any) -> Any:
        number = self.__dict__.get(_NUMBER)
        if session.record.framework == "keras" or number is None:
            return iterate(self)
        return loaders.iterate(self, number, iterate)

    def __len__(self: Any) -> int:
        taken = loaders.lengths.get(self.__dict__.get(_NUMBER, -1))
        return int(length(self)) if taken is None else taken

    patches.put(DataLoader, "__init__", __init__)
    patches.put(DataLoader, "__iter__", __iter__)
    patches.put(DataLoader, "__len__", __len__)


class _Loaders:
    """The DataLoaders by number, in the order in which the script makes them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._iterated: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        if session.others:
            self.lengths = {one.number: one.batches for one in session.others[0].loaders}

    def iterate(self, loader: Any, number: int, iterate: Any) -> Iterator[Any]:
        """Yield the loader's batches; on one rank, the joined batches of all ranks."""
        session = self._session
        times = self._iterated[number] = self._iterated.get(number, -1) + 1
        keys = session.batches(number, times)
        given = ((key, session.joined(key)) for key in keys)
        own = (((number, times, index), batch) for index, batch in enumerate(iterate(loader)))
        for key, batch in given if keys else own:
            session.got(key, batch, _states(), partial(self._note, loader, number))
            yield batch

    def _note(self, loader: Any, number: int) -> None:
        known = self._session.record.loaders
        if loader.batch_size and all(one.number != number for one in known):
            try:
                samples, batches = len(loader.sampler), len(loader)
            except TypeError:  # the loader does not know its length
                return
            known.append(Loader(number, samples, loader.batch_size, bool(loader.drop_last), batches))


def _states() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUT = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_LARGE = 50_000_000  # elements of a sparse gradient beyond which only its values are kept


def install(session: Session) -> Patches:
    """Record every step of every optimizer from now on, until the result is closed."""
    recorder, patches = _Recorder(session), Patches()
    for handle in (
        modules.register_module_forward_pre_hook(recorder.before_forward),
        modules.register_module_forward_hook(recorder.after_forward, always_call=True),
        optimizers.register_optimizer_step_pre_hook(recorder.before_step),
        optimizers.register_optimizer_step_post_hook(recorder.after_step),
    ):
        patches.callback(handle.remove)
    watch_loaders(session, patches)
    _switch_off_dropout(session, patches)
    backward: Any = torch.Tensor.backward
    enter: Any = torch.autocast.__enter__

    def watched_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorder.before_backward(self)
        backward(self, *args, **kwargs)

    def watched_enter(self: Any) -> Any:
        session.record.half |= bool(self._enabled)
        return enter(self)

    patches.put(torch.Tensor, "backward", watched_backward)
    patches.put(torch.autocast, "__enter__", watched_enter)
    return patches


class _Recorder:
    """The state that the hooks share."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._depth = 0
        self._roots: list[nn.Module] = []
        self._names: dict[int, str] = {}
        self._optimizers: list[Any] = []
        self._step: Step | None = None
        self._inside = 0
        self._rates: list[Any] = []

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Read names from the outermost module, and load the ranks' parameters before its first training step."""
        self._depth += 1
        if self._session.record.framework == "keras" or self._depth > 1 or module in self._roots:
            return
        if not module.training or not torch.is_grad_enabled() or not any(True for _ in module.parameters()):
            return
        number = len(self._roots)
        self._roots.append(module)
        taken = set(self._names.values())
        for name, parameter in module.named_parameters():
            name = f"{type(module).__name__}{number}.{name}" if name in taken else name
            self._names.setdefault(id(parameter), name)
        record = self._session.record
        layers = [(name, type(one)) for name, one in module.named_modules() if type(one) in _BATCH_NORM]
        record.batch_norm += [f"{kind.__name__} {name}".rstrip() for name, kind in layers]
        self._take_start(module, number)

    def after_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        """Count the modules that are still running."""
        self._depth -= 1

    def before_backward(self, loss: torch.Tensor) -> None:
        """Record the loss, and that the script trains on the last batch."""
        if self._session.record.framework == "keras" or loss.numel() != 1:
            return
        self._session.lost(float(loss.detach()))
        self._session.trains(_states())

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Record the gradients; if one optimizer's step calls another's, the inner one has the reduced gradients."""
        self._inside += 1
        session = self._session
        if session.record.framework == "keras":
            return
        session.record.framework = "torch"
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            session.record.initial.update(self._read(optimizer))
        if self._step is None:
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            first = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            self._step = Step(self._optimizers.index(optimizer), rates=rates, first_rates=first, **session.take())
            self._put_rates(optimizer)
        self._step.gradients = self._read(optimizer, gradients=True)
        session.record.half |= any(
            one.dtype in (torch.float16, torch.bfloat16) for group in optimizer.param_groups for one in group["params"]
        )

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Record the parameters, and end the process after the last step."""
        self._inside -= 1
        step, session = self._step, self._session
        if self._inside or step is None:
            return
        self._step = None
        step.parameters = self._read(optimizer)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []
        session.record.steps.append(step)
        if session.done:
            session.write()
            raise SystemExit(0)

    def _put_rates(self, optimizer: Any) -> None:
        others, number = self._session.others, len(self._session.record.steps)
        if not others or self._session.own_rates or number >= len(others[0].steps):
            return
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, others[0].steps[number].rates, strict=False):
            group["lr"] = torch.as_tensor(rate).to(group["lr"]) if isinstance(group["lr"], torch.Tensor) else rate

    def _read(self, optimizer: Any, gradients: bool = False) -> dict[str, Array]:
        found = {}
        for at, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                value = parameter.grad if gradients else parameter
                if value is not None:
                    found[self._names.get(id(parameter), f"group.{at}.{i}")] = _thin(value)
        return found

    def _take_start(self, module: nn.Module, number: int) -> None:
        session = self._session
        if session.ranks is None:
            if session.record.rank == 0:
                torch.save(module.state_dict(), session.folder / f"start-torch-{number}")
            return
        path = session.ranks / f"start-torch-{number}"
        if path.exists():
            start, own = torch.load(path, weights_only=False, map_location="cpu"), module.state_dict()
            session.record.other_start |= any(
                name in own and not torch.equal(own[name].cpu(), value) for name, value in start.items()
            )
            module.load_state_dict(start)


def _thin(value: torch.Tensor) -> Array:
    value = value.detach()
    if value.is_sparse:
        value = value.to_dense() if value.numel() <= _LARGE else value.coalesce().values()
    return thin(value.cpu().to(torch.float64 if value.dtype == torch.float64 else torch.float32).numpy())


def _switch_off_dropout(session: Session, patches: Patches) -> None:
    """Turn dropout off, also in attention: ranks and one process would drop different neurons."""
    for name in _DROPOUT:
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

    patches.callback(modules.register_module_forward_pre_hook(before_forward).remove)


def _identity(session: Session, own: Any) -> Any:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        session.record.dropout |= training and p > 0
        return input

    dropout.__name__, dropout.__doc__ = own.__name__, own.__doc__
    return dropout
