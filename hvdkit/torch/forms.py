"""The forms of a public call: it is written once, as a function that returns a Collective, and they follow from that.

collective() makes the call that waits for the result and is differentiable; in_place() and asynchronous() make the
other forms of it, with the same parameters.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hvdkit.errors import NotInitializedError
from hvdkit.torch.collective import Collective
from hvdkit.torch.handles import Handle

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Call = TypeVar("Call", bound=Callable[..., Any])


def collective(definition: Callable[Parameters, Collective[Result]]) -> Callable[Parameters, Result]:
    """The call that does what `definition` returns, and returns the result."""

    define = _rename(definition, definition.__name__.strip("_"))

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return define(*args, **kwargs).do_differentiably()

    result = definition.__annotations__["return"].removeprefix("Collective[").removesuffix("]")
    return _describe(form, definition, definition.__name__, definition.__doc__, result)


def in_place(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The form of a collective() that overwrites what it is given with the result."""
    definition: Callable[Parameters, Collective[Result]] = call.__wrapped__  # type: ignore[attr-defined]

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return define(*args, **kwargs).do(in_place=True)
        except NotInitializedError:
            raise NotInitializedError(f"{name}_()") from None

    name = definition.__name__.strip("_")
    define = _rename(definition, f"{name}_")
    docstring = f"""Do {name}() in place: overwrite what it is given with the result, and return that.

    Shapes, dtypes, arguments and what it raises: as {name}(). A slice or a view with gaps will do. Not differentiable.
    """
    return _describe(form, definition, f"{name}_", docstring, call.__annotations__["return"])


def asynchronous(call: Callable[Parameters, Any], *, in_place: bool = False) -> Callable[Parameters, Handle]:
    """The form of a collective() that returns a handle at once. in_place: it is of the form that in_place() makes."""
    definition: Callable[Parameters, Collective[Any]] = call.__wrapped__  # type: ignore[attr-defined]

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Handle:
        try:
            return define(*args, **kwargs).begin(in_place=in_place)
        except NotInitializedError:
            raise NotInitializedError(f"{name}_async{end}()") from None

    name, end = definition.__name__.strip("_"), "_" if in_place else ""
    define = _rename(definition, f"{name}_async{end}")
    docstring = f"""Begin {name}{end}(); synchronize() returns its result.

    Shapes, dtypes, arguments and what it raises: as {name}(), but what ranks disagree about is raised by
    synchronize(). Not differentiable. The caller leaves the tensors alone until then.
    """
    return _describe(form, definition, f"{name}_async{end}", docstring, "int")


def _rename(definition: Call, name: str) -> Call:
    """A copy of the definition that is called so in Python's errors about arguments."""
    parts = definition.__code__, definition.__globals__, name, definition.__defaults__, definition.__closure__
    copy = types.FunctionType(*parts)
    copy.__qualname__ = name
    return copy  # type: ignore[return-value]


def _describe(form: Call, definition: Callable[..., Any], name: str, docstring: str | None, result: str) -> Call:
    """Give the form a name, a docstring, and the definition's parameters for help() and inspect.signature()."""
    form.__name__ = form.__qualname__ = name
    form.__module__, form.__doc__ = definition.__module__, docstring
    form.__annotations__ = {**definition.__annotations__, "return": result}
    form.__wrapped__ = definition  # type: ignore[attr-defined]
    form.__signature__ = inspect.signature(definition).replace(return_annotation=result)  # type: ignore[attr-defined]
    return form
