"""Tables for terminals: with rich if it is installed, else plain."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyrocket_consumer.cli.streams import print_line
from pyrocket_consumer.text import escape_controls


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns of numbers are aligned to the right."""
    texts = [[escape_controls(str(cell)) for cell in row] for row in rows]
    numeric = [all(isinstance(row[index], (int, float)) for row in rows) for index in range(len(heads))]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=escape_controls(title), title_justify="left")
            for head, right in zip(heads, numeric, strict=True):
                table.add_column(head, justify="right" if right else "left")
            for row in texts:
                table.add_row(*row)
            Console(markup=False, emoji=False).print(table)  # brackets are text
            return
    widths = [max(len(head), *(len(row[index]) for row in texts), 0) for index, head in enumerate(heads)]
    print_line(title)
    for row in [list(heads), ["-" * width for width in widths], *texts]:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        print_line("  " + "  ".join(cells).rstrip())
