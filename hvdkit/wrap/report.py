"""The table of --wrap: what was changed in the script's training, shown once, by rank 0."""

from __future__ import annotations

import sys


class Report:
    """Rows in the order of KINDS; the last word on each counts."""

    KINDS = ("ranks", "optimizer", "data", "batch", "loss", "learning rate", "state", "metrics", "output", "note")

    def __init__(self) -> None:
        self.rows: dict[str, list[str]] = {}
        self.shown = False

    def say(self, kind: str, text: str) -> None:
        """Add a line to a row; the same line is there once. After the table was shown nothing is added."""
        lines = self.rows.setdefault(kind, [])
        if text and text not in lines:
            lines.append(text)

    def ordered(self) -> list[tuple[str, str]]:
        """The rows as they are shown."""
        return [(kind, "\n".join(self.rows[kind])) for kind in self.KINDS if self.rows.get(kind)]

    def show(self, *, here: bool) -> None:
        """Show the table once, on stderr. here: does this rank show it?"""
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
