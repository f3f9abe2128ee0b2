"""`soloist bench compare` and `report`; what every other bench does with its rows."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soloist.cli import options as o
from soloist.cli.terminal import print_json, status
from soloist.errors import SettingError, UserError
from soloist.files import write_text

if TYPE_CHECKING:
    from soloist.bench.compare import Comparison
    from soloist.bench.rows import AnyRow

_EXIT_SLOWER = 4


def compare(
    before: Annotated[Path, typer.Argument(help="A result file, the baseline.")],
    after: Annotated[Path, typer.Argument(help="The result file to compare with it.")],
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """What became slower or faster between two result files; exit status 4 if anything is slower.

    A change counts if the medians differ by more than the threshold and one median is outside the
    range of the other file's runs. Rows that only one file has are listed.
    """
    from soloist.bench import record
    from soloist.bench.compare import compare as compare_rows

    _check_threshold(threshold)
    made = compare_rows(record.read(before), record.read(after), threshold)
    if json:
        print_json({**asdict(made), "regressions": len(made.regressions)})
    else:
        _show(made)
    _judge(made)


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """One HTML page with plots of result files, side by side; it needs no other file."""
    from soloist.bench import record
    from soloist.bench import report as page

    # Without the folders that they share: where they lie here tells readers elsewhere nothing.
    paths = [file.resolve() for file in files]
    shared = commonpath([path.parent for path in paths])
    rows = {path.relative_to(shared).as_posix(): record.read(path) for path in paths}
    write_text(output, page.report(rows))
    status(f"{output}: {sum(map(len, rows.values()))} rows")


@dataclass(frozen=True, slots=True)
class Baseline:
    """Rows to hold new ones against, read before anything is measured or written."""

    file: Path
    rows: list[dict[str, Any]]
    threshold: float


def read_baseline(file: Path | None, threshold: float) -> Baseline | None:
    """What the options name.

    Raises:
        UserError, SettingError: the file cannot be read, or the threshold is none.
    """
    from soloist.bench import record

    _check_threshold(threshold)
    return None if file is None else Baseline(file, record.read(file), threshold)


def show(
    rows: "Sequence[AnyRow]",
    table: "Callable[[Sequence[Any]], None]",
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Write rows to `output`, print them, by `table` or as JSON, and say if others disturbed them.

    Args:
        rows: new ones.
        table: prints them for people.
        output: a result file, or None.
        as_json: for programs.
    """
    from soloist.bench import record

    if output is not None:
        record.write(output, rows)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        table(rows)
    warn_of_others(rows)


def hold_against(baseline: Baseline | None, rows: "Sequence[AnyRow]") -> None:
    """Compare new rows with a baseline, on stderr.

    Raises:
        typer.Exit: something is slower.
        UserError: the baseline has no row like these.
    """
    if baseline is None:
        return
    from soloist.bench.compare import compare as compare_rows

    made = compare_rows(baseline.rows, [asdict(row) for row in rows], baseline.threshold)
    for d in made.differences:
        status(
            f"{d.row}: {d.unit} {_number(d.before)} → {_number(d.after)} "
            f"({_change(d.change)}), {d.verdict}"
        )
    for name in made.only_after:
        status(f"not in {baseline.file}: {name}")
    _judge(made)


def warn_of_others(rows: "Sequence[AnyRow]") -> None:
    """Say on stderr where other processes used the processor while rows were measured."""
    from soloist.bench.others import QUIET_CORES

    most = max((getattr(row, "others_cores", None) or 0.0 for row in rows), default=0.0)
    if most > QUIET_CORES:
        status(
            f"warning: the machine was not quiet: other processes used up to {most:.2f} cores "
            "during the measurement, so results may be worse than the machine allows"
        )


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold < 1:
        raise SettingError("--threshold", threshold, "from 0 to less than 1, such as 0.05")


def _judge(made: "Comparison") -> None:
    """Without a single pair nothing was compared, which is no success."""
    if not made.differences:
        nearest = f" (nearest: {made.apart})" if made.apart else ""
        raise UserError(
            f"the two results have no row in common{nearest}",
            "rows are compared if model, device, precision, lengths and columns are equal",
        )
    if made.regressions:
        raise typer.Exit(_EXIT_SLOWER)


def _show(made: "Comparison") -> None:
    from soloist.cli import tables

    if made.differences:
        tables.show_table(
            ("row", "figure", "before", "after", "change", "verdict"),
            [
                (d.row, d.unit, _number(d.before), _number(d.after), _change(d.change), d.verdict)
                for d in made.differences
            ],
        )
    for where, names in (("before", made.only_before), ("after", made.only_after)):
        for name in names:
            print(f"only {where}: {name}")
    print(f"{len(made.regressions)} of {len(made.differences)} figures slower")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


def _change(share: float | None) -> str:
    return "–" if share is None else f"{share:+.1%}"
