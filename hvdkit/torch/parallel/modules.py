"""The modules of this rank, and the outline of the whole model to which they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvdkit.parallel.patterns import select


@dataclass(frozen=True)
class Outline:
    """names: of all modules of the whole model, in its order. blocks: of the repeating modules, such as its layers."""

    names: tuple[str, ...]
    blocks: tuple[str, ...]


class Stage(nn.Module):
    """Some modules of a chain, one after the other, under their names in the whole model.

    parts: by name. outline: of the whole model.
    """

    def __init__(self, parts: Mapping[str, nn.Module], outline: Outline) -> None:
        super().__init__()
        self.part_names, self.outline = tuple(parts), outline
        for name, part in parts.items():
            put(self, name, part)

    def forward(self, value: torch.Tensor) -> Any:
        """Call the parts in turn, each with the result of the one before it."""
        for name in self.part_names:
            value = self.get_submodule(name)(value)
        return value


def put(tree: nn.Module, name: str, module: nn.Module) -> None:
    """Make `module` the submodule of this name, adding parent modules if necessary."""
    *above, last = name.split(".")
    for part in above:
        if part not in dict(tree.named_children()):
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    if isinstance(tree, (nn.ModuleList, nn.Sequential)) and last in tree._modules:
        tree[int(last)] = module
    else:
        tree.add_module(last, module)


def outline_of(model: nn.Module) -> Outline:
    """Return the outline of the whole model that this module, or stage, belongs to."""
    if isinstance(model, Stage):
        return model.outline
    names = tuple(name for name, _ in model.named_modules() if name)
    return Outline(names, tuple(_find_blocks(model, "")))


def _find_blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield sibling modules of one class that have children themselves; the outermost ones."""
    counts = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        if not any(True for _ in child.children()):
            continue
        if counts[type(child)] > 1 and not isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield prefix + name
        else:
            yield from _find_blocks(child, f"{prefix}{name}.")


def select_blocks(call: str, model: nn.Module, blocks: str | Sequence[str] | None) -> list[str]:
    """Return the names of the blocks in this module. blocks: patterns; None for the repeating modules.

    Raises ParallelError for a pattern that matches no module of the whole model.
    """
    outline = outline_of(model)
    patterns = [blocks] if isinstance(blocks, str) else blocks
    wanted = outline.blocks if patterns is None else select(call, patterns, outline.names)
    here = {name for name, _ in model.named_modules()}
    return [name for name in wanted if name in here]
