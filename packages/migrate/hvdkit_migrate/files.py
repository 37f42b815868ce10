"""Reads scripts, and writes them whole or not at all."""

from __future__ import annotations

import io
import os
import tempfile
import tokenize
from contextlib import ExitStack
from pathlib import Path


class MigrateError(ValueError):
    """A script cannot be read, is of no supported kind, or cannot be written."""


def read_script(path: str) -> tuple[str, str]:
    """Read a script; returns its text, with its own line breaks, and its encoding.

    Raises MigrateError if that fails.
    """
    try:
        data = Path(path).read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except OSError as error:
        raise MigrateError(f"{path}: cannot be read: {error.strerror}. Check the path.") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise MigrateError(
            f"{path}:1: cannot be decoded as text: {error}. Check that it is a Python script and its encoding line."
        ) from None


def write_script(path: str, text: str, encoding: str) -> None:
    """Replace a script by a new text atomically, and keep its mode. Raises MigrateError if it cannot be written."""
    target = Path(path).resolve()  # of a link, its target
    try:
        with ExitStack() as unfinished:
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            unfinished.callback(os.unlink, name)
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode(encoding))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, target.stat().st_mode & 0o7777)
            os.replace(name, target)
            unfinished.pop_all()
    except OSError as error:
        raise MigrateError(f"{path}: cannot be written: {error.strerror}. The script is as it was.") from None
