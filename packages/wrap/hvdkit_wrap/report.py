"""The table of --wrap, which lists the changes of the script's training; rank 0 prints it once."""

from __future__ import annotations

import sys


class Report:
    """The rows of the table, in the order of KINDS; each row collects its lines."""

    KINDS = ("ranks", "optimizer", "data", "batch", "loss", "learning rate", "state", "metrics", "output", "note")

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}
        self.shown = False

    def say(self, kind: str, text: str) -> None:
        """Add a line to a row, unless the row has it already. Lines that come after show() are not printed."""
        lines = self.rows.setdefault(kind, [])
        if text and text not in lines:
            lines.append(text)

    def ordered(self) -> list[tuple[str, str]]:
        """Return (kind, text) of each row, in the order of the table."""
        return [(kind, "\n".join(self.rows[kind])) for kind in self.KINDS if self.rows.get(kind)]

    def show(self, *, here: bool) -> None:
        """Print the table once, on stderr. here: does this rank print it?"""
        if self.shown:
            return
        self.shown = True
        if not here:
            return
        from rich.console import Console
        from rich.table import Table

        caption = (
            "experimental: --wrap patches internals of PyTorch and Keras; check the result with hvdkit compare --wrap"
        )
        table = Table(title="hvdrun --wrap", title_justify="left", show_header=False)
        table.caption, table.caption_justify = caption, "left"
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for kind, text in self.ordered():
            table.add_row(kind, text)
        console = Console(file=sys.stderr)
        # A pipe to hvdrun has no width; 80 columns would break every line.
        Console(file=sys.stderr, width=console.width if console.is_terminal else 110).print(table)
