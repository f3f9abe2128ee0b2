"""`soloist quantize`: writes the folder before the user's eyes, and says what it saved."""

from dataclasses import asdict
from pathlib import Path

from soloist.cli.loading import progress_bar
from soloist.cli.tables import show_table
from soloist.cli.terminal import print_json, status
from soloist.errors import gigabytes
from soloist.model.folder import find_adapter, find_model
from soloist.settings import read_settings
from soloist.weights.export import write_export
from soloist.weights.export_plan import Asked, ExportPlan, plan_export


def write(
    model: str,
    revision: str | None,
    asked: Asked,
    output: Path,
    adapter: str | None = None,
    *,
    as_json: bool,
) -> None:
    """Quantise a model, with an adapter merged into it, and print sizes before and after.

    Raises:
        UserError, DiskFull: the model cannot be quantised so, or the folder not be written.
    """
    offline = read_settings().hub_offline
    source = find_model(model, revision=revision, offline=offline)
    merged = None if adapter is None else find_adapter(adapter, offline=offline)
    plan = plan_export(source, asked, merged)
    with progress_bar("quantising") as advance:
        files = write_export(plan, output, advance)
    count = f"{len(files)} file{'s' * (len(files) > 1)} of weights"
    status(f"{output} · {count} · compressed-tensors, {plan.format}")
    if as_json:
        print_json(_facts(plan, output, files))
    else:
        _show(plan)


def _facts(plan: ExportPlan, output: Path, files: list[Path]) -> dict[str, object]:
    return {
        "folder": str(output),
        "format": plan.format,
        "files": [file.name for file in files],
        "parts": [{**asdict(size), "part": size.part.value} for size in plan.sizes()],
    }


def _show(plan: ExportPlan) -> None:
    sizes = plan.sizes()
    rows = [
        (
            size.part.value,
            f"{size.tensors:,}",
            ", ".join(size.stored_as),
            gigabytes(size.before_bytes) if size.before_bytes else "tied",
            gigabytes(size.after_bytes),
        )
        for size in sizes
    ]
    before = sum(size.before_bytes for size in sizes)
    after = sum(size.after_bytes for size in sizes)
    count = sum(size.tensors for size in sizes)
    rows.append(("total", f"{count:,}", "", gigabytes(before), gigabytes(after)))
    show_table(("weights", "tensors", "stored as", "before", "after"), rows)
