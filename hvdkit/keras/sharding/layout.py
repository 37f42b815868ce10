"""The variables of an optimizer that was built on pieces, in the order that they have in the plain optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SlotGroup:
    """Slots that an optimizer makes variable by variable. slots: of each a list with a variable for each piece."""

    name: str
    slots: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One variable of the plain optimizer: a shared one, or the slot of a tensor.

    variable: the shared one, such as the number of steps. slot: a variable for each piece of the rank's. tensor: index.
    """

    variable: Any = None
    slot: Sequence[Any] = ()
    tensor: int = -1


class SlotLayout:
    """Recorded while the optimizer is built."""

    def __init__(self) -> None:
        self.groups: list[SlotGroup] = []

    def add_group(self, slots: Sequence[Sequence[Any]]) -> None:
        """Slots that were made by one call of add_optimizer_variables()."""
        self.groups.append(SlotGroup("", [list(slot) for slot in slots]))

    def add(self, name: str, variable: Any) -> None:
        """A slot's variable for one piece, made by itself: one slot after the other."""
        if not self.groups or self.groups[-1].name != name:
            self.groups.append(SlotGroup(name, [[]]))
        self.groups[-1].slots[0].append(variable)

    def slots(self) -> list[list[Any]]:
        """All slots, as in SlotGroup."""
        return [slot for group in self.groups for slot in group.slots]

    def entries(self, variables: Sequence[Any], tensors: int) -> Iterator[Entry]:
        """The plain optimizer's variables. variables: those of this optimizer; tensors: how many it trains."""
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
