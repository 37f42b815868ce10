"""Which modules and public names hvdkit has, read from its files: no framework is imported."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def has_module(dotted: str) -> bool:
    """Is there a module of hvdkit at this path, as "hvdkit.torch.mpi_ops"?"""
    return _file(dotted) is not None


def _file(dotted: str) -> Path | None:
    base = _ROOT.joinpath(*dotted.split(".")[1:])
    return next((one for one in (base / "__init__.py", base.with_suffix(".py")) if one.is_file()), None)


@cache
def public_names(dotted: str) -> frozenset[str]:
    """What a module of hvdkit lists in its `__all__`; empty if it lists nothing itself."""
    path = _file(dotted)
    for node in ast.parse(path.read_text()).body if path else ():
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return frozenset(str(ast.literal_eval(one)) for one in node.value.elts)
    return frozenset()
