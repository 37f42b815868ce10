from __future__ import annotations

import pytest
from docstrings import check_docstring, functions_of

import hvdkit.torch as hvd


@pytest.mark.parametrize("name", functions_of(hvd))
def test_a_public_function_says_what_it_takes_and_raises(name: str) -> None:
    check_docstring(hvd, name)
