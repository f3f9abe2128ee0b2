"""Tables for people: rich where stdout is a terminal, plain aligned text where it is not."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from soloist.cli.terminal import print_json

if TYPE_CHECKING:
    from soloist.bench.record import Row


def show_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, names and values."""
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        print(title)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Several columns; the first is text, the others are figures."""
    if not sys.stdout.isatty():
        table = [headings, *rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
        for row in table:
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join([first, *others]).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    rich_table = Table()
    for i, heading in enumerate(headings):
        rich_table.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        rich_table.add_row(*row)
    Console().print(rich_table)


def show_rows(rows: "Sequence[Row]", *, as_json: bool) -> None:
    """Benchmark rows as a table, or as JSON."""
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    first = rows[0]
    wide = ""
    if first.columns > 1:
        wide = f" · {first.columns} columns a step, of {first.sequences} sequence"
        wide += "s" * (first.sequences > 1)
    if first.start_position not in (None, first.prompt_tokens):
        wide += f" · decode from position {first.start_position:,}"
    print(
        f"{first.shape} · {first.precision} · {first.device} · {first.prompt_tokens} prompt + "
        f"{first.new_tokens} new tokens{wide} · {first.runs} runs · reads at "
        f"{first.bandwidth_gb_per_s} GB/s · no speculation"
    )
    show_table(
        ("engine", "TTFT ms", "decode tokens/s", "min – max", "MBU"),
        [
            (
                row.engine,
                f"{row.ttft_ms.median:.1f}",
                f"{row.decode_tokens_per_s.median:.1f}",
                f"{row.decode_tokens_per_s.min:.1f} – {row.decode_tokens_per_s.max:.1f}",
                f"{row.mbu:.0%}",
            )
            for row in rows
        ],
    )
