"""Opens C libraries by ctypes: finds the file, declares the functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_char_p, c_int
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import MissingDependencyError

#: Function's name in hvdkit's code -> its symbol, and its parameters' types.
Functions = Mapping[str, tuple[str, tuple[object, ...]]]


@dataclass(frozen=True, eq=False)
class CLibrary:
    """A C library, and what hvdkit calls in it.

    name: of the library, for messages.
    files: names that open() tries, in this order.
    functions: see Functions. They return an int, unless named in `texts`.
    cure: what to do if the library is missing.
    texts: functions that return a string.
    """

    name: str
    files: tuple[str, ...]
    functions: Functions
    cure: str
    texts: tuple[str, ...] = ()

    def mapped(self, maps: str = "/proc/self/maps") -> list[str]:
        """Return the files of this library, of any version, that this process has loaded."""
        start = self.files[0].partition(".so")[0] + ".so"
        found: dict[str, None] = {}
        with open(maps) as lines:
            for line in lines:
                path = "/" + line.rstrip("\n").partition("/")[2]
                if os.path.basename(path).startswith(start):
                    found[path] = None
        return list(found)

    def open(self, path: str = "") -> tuple[str, dict[str, Any]]:
        """Open the library. path: its file; "" to try `files`.

        Returns the file, and the functions by their names in hvdkit's code. Raises MissingDependencyError.
        """
        problems = []
        for file in (path,) if path else self.files:
            try:
                library = ctypes.CDLL(file)
            except OSError as error:  # the text begins with the name of the file
                problems.append(str(error) if file in str(error) else f"{file}: {error}")
                continue
            try:
                opened = {name: getattr(library, symbol) for name, (symbol, _) in self.functions.items()}
            except AttributeError as error:
                raise MissingDependencyError(f"{self.name} in {file} lacks a function: {error}. {self.cure}") from error
            for name, (_, types) in self.functions.items():
                opened[name].argtypes, opened[name].restype = types, c_char_p if name in self.texts else c_int
            return file, opened
        raise MissingDependencyError(f"{self.name} cannot be loaded: {'; '.join(problems)}. {self.cure}")
