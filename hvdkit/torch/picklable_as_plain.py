"""Copies and pickles of a wrapped optimizer, which are plain optimizers of the user's class, without hvdkit."""

from __future__ import annotations

import copy
import copyreg
import sys
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hvdkit.torch.uncompiled import uncompiled

_newobj = copyreg.__newobj__  # type: ignore[attr-defined]
#: Methods of a mixin that communicate with other ranks, or clear gradients: torch.compile leaves them alone.
_COMMUNICATING = ("step", "zero_grad", "synchronize", "state_dict", "load_state_dict", "add_param_group")


class PicklableAsPlain:
    """Mixin that makes copies and pickles of an optimizer those of its own class, without the mixin.

    A copy takes part in no collective, so a single rank may make it, and a pickle can be loaded without hvdkit. The own
    class's `__getstate__`, `__reduce__` and `__deepcopy__` decide on its content.
    """

    #: The optimizer's class before it was wrapped; change_class sets it.
    _hvdkit_own_class: ClassVar[type[torch.optim.Optimizer]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the object as a plain optimizer, for pickle and copy.copy."""
        make, arguments, *rest = _plain(self).__reduce_ex__(protocol)
        if make is _newobj:  # pickle would compare the pickled class with the class of this object
            make = arguments[0].__new__
        return (make, arguments, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as a plain optimizer over copies of the parameters: those of a model that is copied in the same call."""
        if vars(self).get("_hvdkit") is not None:  # else it is a plain optimizer already
            own = own_class(self).__name__
            warnings.warn(
                f"copy.deepcopy() of a DistributedOptimizer returns a plain {own}, whose step() uses the gradients of "
                f"this rank only. To train the copy on all ranks, call hvd.DistributedOptimizer() on it on every rank.",
                stacklevel=3,
            )
        result = memo[id(self)] = _plain(self)  # before its content, which may refer to the optimizer
        result.__dict__ = copy.deepcopy(_plain(self), memo).__dict__
        return result


def change_class(
    optimizer: torch.optim.Optimizer,
    mixin: type[PicklableAsPlain],
    parameter_names: Mapping[torch.nn.Parameter, str],
    attributes: Mapping[str, Any],
) -> None:
    """Change the optimizer, in place, to a subclass of `mixin` and of its own class.

    mixin: the class whose methods precede the optimizer's own.
    parameter_names: name of each parameter.
    attributes: values that the mixin needs; their names begin with _hvdkit.
    """
    own = own_class(optimizer)
    # As in Horovod: PyTorch Lightning 1 finds wrapped optimizers by "horovod" in str(type(optimizer)).
    package = "horovod" if "hvdkit.alias_horovod" in sys.modules else "hvdkit"
    body = {"__module__": f"{package}.torch.optimizer", "__doc__": own.__doc__, "_hvdkit_own_class": own}
    body.update({name: uncompiled(getattr(mixin, name)) for name in _COMMUNICATING if hasattr(mixin, name)})
    optimizer.__class__ = type(own.__name__, (mixin, own), body)
    optimizer.__dict__.update({"_parameter_names": parameter_names, **attributes})


def own_class(optimizer: Any) -> type[torch.optim.Optimizer]:
    """Return the optimizer's class before it was wrapped."""
    kind = type(optimizer)
    return kind._hvdkit_own_class if issubclass(kind, PicklableAsPlain) else kind


def is_wrapped(optimizer: Any) -> bool:
    """Return whether the optimizer was wrapped; a script's own instance of a wrapped optimizer's class was not."""
    return isinstance(optimizer, PicklableAsPlain) and "_parameter_names" in vars(optimizer)


def _plain(optimizer: Any) -> Any:
    """Make an optimizer of the own class that shares all the optimizer's attributes except hvdkit's."""
    result = object.__new__(own_class(optimizer))
    for name, value in vars(optimizer).items():
        if not name.startswith("_hvdkit") and name != "_parameter_names":
            result.__dict__[name] = value
    return result
