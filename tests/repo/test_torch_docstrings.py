from __future__ import annotations

import inspect
import pickle
import re
import typing

import pytest
from docstrings import docstring_faults, functions_of

import hvdkit.torch as hvd


def test_every_public_function_states_its_tensors_and_errors() -> None:
    assert [fault for name in functions_of(hvd) for fault in docstring_faults(hvd, name)] == []


def _forms() -> list[tuple[str, str]]:
    """Calls that are forms of another one, which their docstrings name."""
    pairs = []
    for name in functions_of(hvd):
        found = re.fullmatch(r"([a-z_]+?)(?:_async_|_async|_)", name)
        if found and found[1] in hvd.__all__ and name != "sparse_allreduce_async":
            pairs.append((name, found[1]))
    return pairs


def test_every_form_of_a_call_is_known_here() -> None:
    assert len(_forms()) == 14


def test_a_form_of_a_call_takes_what_the_call_takes_and_points_to_it() -> None:
    for name, call in _forms():
        form, parameters = getattr(hvd, name), dict(inspect.signature(getattr(hvd, call)).parameters)
        parameters.pop("compression", None)  # as in Horovod
        assert dict(inspect.signature(form).parameters) == parameters, name
        assert f"as {call}()" in form.__doc__, name
        assert form.__name__ == name and pickle.loads(pickle.dumps(form)) is form, name
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument"):
            form(unknown=1)
        returns = typing.get_type_hints(form)["return"]
        awaited = typing.get_type_hints(getattr(hvd, call))["return"]
        assert returns == (int if "_async" in name else awaited), name
