"""Describes settings, and parses and checks their values."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from hvdkit.errors import ConfigError

MIB = 1024 * 1024


def parse_bool(text: str) -> bool:
    """Turn "1 true yes on" or "0 false no off" (any case) into a bool; ValueError for anything else."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def parse_bytes(text: str) -> int:
    """Turn "4194304", "4096k", "4m" or "1g" (binary multiples, any case) into a number of bytes."""
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1024, "m": MIB, "g": 1024 * MIB}.get(word[-1:], 1)
    try:
        number = float(word.rstrip("kmg")) * factor
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a number of bytes; write 4194304, 4096k or 4m")
    return int(number)


@dataclass(frozen=True)
class Choice:
    """A parser that accepts only these names, in any case, and raises ValueError for other text."""

    names: tuple[str, ...]

    def __call__(self, text: str) -> str:
        """Return the name that equals the text, in lower case."""
        word = text.strip().lower()
        if word not in self.names:
            raise ValueError(f"use one of {', '.join(self.names)}")
        return word


#: Type of a setting's default -> the types that its value may have, and their description in messages.
_KINDS: dict[type, tuple[Any, str]] = {
    bool: ((numbers.Integral,), "True or False"),
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
    str: ((str, os.PathLike), "a string"),
}


def find_problem(name: str, value: Any, default: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the problem with the value of a setting; "" if it is valid.

    name: the setting's name.
    value: the value to check.
    default: the setting's default, which determines the type.
    metadata: the metadata of its field, see setting().
    """
    parse, least, most = metadata["parse"], metadata["least"], metadata["most"]
    types, kind = _KINDS[type(default)]
    if isinstance(parse, Choice) and value not in parse.names:
        return f"{name} is {value!r}; use one of {', '.join(parse.names)}"
    if not isinstance(value, types):
        return f"{name} is {value!r}; it must be {kind}"
    if least is not None and not (math.isfinite(value) and least <= value <= most):
        bounds = f"{least} or more" if most == math.inf else f"from {least} to {most}"
        return f"{name} is {value}; it must be {bounds}{'' if math.isfinite(value) else ', and finite'}"
    return ""


def read_arguments(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that keyword arguments give; None gives no setting, and 64e6 counts as a whole number.

    values: the values of all settings without the arguments. Raises TypeError for an argument that is not a setting.
    """
    check_names(arguments, values)
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if type(values[name]) is int and isinstance(value, float) and value.is_integer():
            given[name] = int(value)
    return given


def check_names(arguments: Iterable[str], names: Iterable[str]) -> None:
    """Raise TypeError for an argument that is not among the names of the settings."""
    known = list(names)
    for name in arguments:
        if name not in known:
            from difflib import get_close_matches  # takes 7 ms to import

            nearest = get_close_matches(name, known, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"the settings are {', '.join(known)}."
            raise TypeError(f"there is no setting {name!r}; {hint}")


def find_misspelt(variables: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Find HVDKIT_ variables that are no setting's but resemble one; returns the setting's variable for each.

    names: the names of the settings. Variables that resemble no setting are left out, because hvdrun and a cluster's
    modules have variables of their own.
    """
    prefix, known = "HVDKIT_", [name.upper() for name in names]
    found = {}
    for variable in sorted(variables):
        name = variable.removeprefix(prefix)
        if name != variable and name not in known:
            from difflib import get_close_matches  # takes 7 ms to import

            for nearest in get_close_matches(name, known, 1, 0.7):
                found[variable] = prefix + nearest
    return found


def choice(*names: str) -> Choice:
    """Make a parser that accepts only these names."""
    return Choice(names)


def setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    horovod: str = "",
    disable: str = "",
    flag: str = "",
    secret: bool = False,
    least: float | None = None,
    most: float = math.inf,
    metavar: str = "VALUE",
) -> Any:
    """Describe a field of Config, or of a package's Settings.

    default: the field's default.
    parse: turns the variable's text into the value; raises ValueError with the accepted values.
    help: the meaning, for the help of hvdrun's option and for `hvdkit doctor --settings`.
    horovod: Horovod's variable of the same meaning and unit; "" for none.
    disable: Horovod's variable that sets the field to 0; "" for none.
    flag: the option of hvdrun that sets it; "" for none.
    secret: the value is never shown.
    least: the lower bound of a number, which must be finite; None for no bounds.
    most: the upper bound of a number.
    metavar: the value's name in the help.
    """
    metadata = {"parse": parse, "help": help, "horovod": horovod, "disable": disable, "flag": flag, "secret": secret}
    return field(default=default, metadata={**metadata, "least": least, "most": most, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a frozen dataclass whose fields are settings, made by setting().

    A package subclasses it, and names the subclass in an entry point `PREFIX = module:Class` of the group
    `hvdkit.settings`. A field has the variable HVDKIT_PREFIX_FIELD; its option, if any, begins with --PREFIX-.

    prefix: of the names; "" for hvdkit's own settings.

    Raises ConfigError for values of a wrong type, or out of bounds.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        checked = (
            find_problem(self.name_of(item.name), getattr(self, item.name), item.default, item.metadata)
            for item in fields(self)
        )
        problems = [problem for problem in checked if problem]
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def name_of(cls, field: str) -> str:
        """Return the name of the setting of a field."""
        return f"{cls.prefix}_{field}" if cls.prefix else field


@dataclass(frozen=True)
class Setting:
    """A setting with its current value, for `hvdkit doctor --settings` and for hvdrun's flags."""

    name: str
    variable: str
    horovod: str
    flag: str
    help: str
    default: Any
    value: Any
    origin: str
    secret: bool = False
    choices: tuple[str, ...] = ()
    metavar: str = "VALUE"

    @property
    def shown(self) -> Any:
        """Return the value to show, which hides a secret."""
        return "(not shown)" if self.secret and self.value else self.value
