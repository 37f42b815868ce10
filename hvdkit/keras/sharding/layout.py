"""Mapping from the variables of an optimizer built on slices to the order of the plain optimizer's variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SlotGroup:
    """Slots that an optimizer makes variable by variable. slots: each a list with one variable per slice."""

    name: str
    slots: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One variable of the plain optimizer: a shared variable, or the slot of a tensor.

    variable: shared, such as the number of steps. slot: one variable per slice of the rank. tensor: its index.
    """

    variable: Any = None
    slot: Sequence[Any] = ()
    tensor: int = -1


class SlotLayout:
    """The layout of slots, recorded while the optimizer is built."""

    def __init__(self) -> None:
        self.groups: list[SlotGroup] = []

    def add_group(self, slots: Sequence[Sequence[Any]]) -> None:
        """Record slots that one call of add_optimizer_variables() has made."""
        self.groups.append(SlotGroup("", [list(slot) for slot in slots]))

    def add(self, name: str, variable: Any) -> None:
        """Record a slot's single variable for one slice; the slots come one after the other."""
        if not self.groups or self.groups[-1].name != name:
            self.groups.append(SlotGroup(name, [[]]))
        self.groups[-1].slots[0].append(variable)

    def slots(self) -> list[list[Any]]:
        """Return all slots, as in SlotGroup."""
        return [slot for group in self.groups for slot in group.slots]

    def entries(self, variables: Sequence[Any], tensors: int) -> Iterator[Entry]:
        """Yield the plain optimizer's variables. variables: this optimizer's. tensors: number of trained ones."""
        group_of = {id(variable): group for group in self.groups for slot in group.slots for variable in slot}
        written = set()
        for variable in variables:
            group = group_of.get(id(variable))
            if group is None:
                yield Entry(variable)
            elif id(group) not in written:
                written.add(id(group))
                for tensor in range(tensors):
                    for slot in group.slots:
                        yield Entry(slot=slot, tensor=tensor)
