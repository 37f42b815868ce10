"""The forms of a public call: it is written once, as a function that returns a Collective, and they follow from that.

collective() makes the call that waits for the result and is differentiable; in_place() and asynchronous() make the
other forms of it, with the same parameters.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

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
        except _BAD_ARGUMENTS as error:
            _name_form(error, name, f"{name}_")
            raise

    name = definition.__name__.strip("_")
    define = _rename(definition, f"{name}_")
    docstring = f"""Do {name}() in place: overwrite the input with the result, and return the input.

    Shapes, dtypes and arguments: as {name}(), and it raises the same errors. The input may be a slice or a
    non-contiguous view. Not differentiable.
    """
    return _describe(form, definition, f"{name}_", docstring, call.__annotations__["return"])


def asynchronous(call: Callable[Parameters, Any], *, in_place: bool = False) -> Callable[Parameters, Handle]:
    """The form of a collective() that returns a handle at once. in_place: it is of the form that in_place() makes."""
    definition: Callable[Parameters, Collective[Any]] = call.__wrapped__  # type: ignore[attr-defined]

    def form(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Handle:
        try:
            return define(*args, **kwargs).begin(in_place=in_place)
        except _BAD_ARGUMENTS as error:
            _name_form(error, name, f"{name}_async{end}")
            raise

    name, end = definition.__name__.strip("_"), "_" if in_place else ""
    define = _rename(definition, f"{name}_async{end}")
    docstring = f"""Start {name}{end}() and return a handle at once; synchronize(handle) returns the result.

    Shapes, dtypes and arguments: as {name}(), and it raises the same errors; but if ranks disagree, synchronize()
    raises the error. Not differentiable. Do not read or change the tensors before synchronize() has returned.
    """
    return _describe(form, definition, f"{name}_async{end}", docstring, "int")


#: What the definition of a call raises for its arguments, or before init().
_BAD_ARGUMENTS = (TypeError, ValueError, NotImplementedError)


def _name_form(error: Exception, name: str, form: str) -> None:
    """Have a message that begins with the call `name` begin with the form of it that the user called."""
    message = str(error)
    if message.startswith(f"{name}()"):
        error.args = (form + message.removeprefix(name),)


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
