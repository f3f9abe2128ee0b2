"""`soloist bench` but for decode, startup and accuracy, and what all of them do with their rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soloist.cli import options as o
from soloist.cli.terminal import print_json, status
from soloist.errors import SettingError, UserError

if TYPE_CHECKING:
    from soloist.bench.client import Api
    from soloist.bench.compare import Comparison
    from soloist.bench.rows import AnyRow, Prefix
    from soloist.bench.traffic import Traffic

_EXIT_SLOWER = 4
_MBU, _COST = "Memory-bandwidth utilisation", "Cost"

_Url = Annotated[str, typer.Argument(help="Of the server, such as http://localhost:8000.")]
_Api = Annotated[str, typer.Option(help="Route to use: chat, completions.")]
_ServedModel = Annotated[
    str | None, typer.Option(help="As the server calls it; default: the first it lists.")
]
_ApiKey = Annotated[str | None, typer.Option(help="Sent as a bearer token.")]
_Name = Annotated[
    str | None, typer.Option(help="Of the engine, for the rows; default: the address.")
]


def _checked_api(given: str) -> "Api":
    if given not in ("chat", "completions"):
        raise SettingError("--api", given, "chat, completions")
    return "chat" if given == "chat" else "completions"


def _read_traffic(
    config: Path | None, precision: str | None, bandwidth: Path | None
) -> "Traffic | None":
    """What three options tell together; None without them."""
    from soloist.bench.traffic import read_traffic

    if config is None and precision is None and bandwidth is None:
        return None
    if config is None or precision is None or bandwidth is None:
        given = [str(x) for x in (config, precision, bandwidth) if x is not None]
        raise SettingError(
            "--config, --precision and --bandwidth", ", ".join(given), "all three, for MBU, or none"
        )
    return read_traffic(config, precision, bandwidth)


def serve(
    url: _Url,
    api: _Api = "chat",
    model: _ServedModel = None,
    api_key: _ApiKey = None,
    name: _Name = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text; default: Python text.")
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the prompt as the server counts it; may be repeated.",
            show_default="256",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 256,
    runs: Annotated[int, typer.Option(help="Timed runs after one to warm up.")] = 5,
    prefix: Annotated[
        str,
        typer.Option(
            help="cold: prompts that begin differently each time; warm: one prompt; or both."
        ),
    ] = "both",
    config: Annotated[
        Path | None,
        typer.Option(help="The model's config.json: bytes a token.", rich_help_panel=_MBU),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="How the server holds the weights: fp32, bf16, fp16, fp8, int4 or fp4.",
            rich_help_panel=_MBU,
        ),
    ] = None,
    bandwidth_file: Annotated[
        Path | None,
        typer.Option(
            "--bandwidth",
            help="Result file of soloist bench bandwidth, made on the server's machine.",
            rich_help_panel=_MBU,
        ),
    ] = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time to first token and decode speed of any OpenAI-compatible server, one request at a time.

    Tokens are counted by the server, in every chunk or at the end; chunks are not counted.
    """
    from soloist.bench import record
    from soloist.bench import serve as bench_serve
    from soloist.cli import tables

    if prompt is not None and prompt_tokens:
        raise SettingError("--prompt-tokens", prompt_tokens[0], "without --prompt")
    prefixes = _checked_prefixes(prefix)
    known = read_baseline(baseline, threshold)
    traffic = _read_traffic(config, precision, bandwidth_file)
    rows = bench_serve.measure(
        bench_serve.Plan(
            url=url,
            api=_checked_api(api),
            model=model,
            key=api_key,
            name=name,
            prompt=prompt,
            prompt_tokens=tuple(prompt_tokens or (256,)),
            max_tokens=max_tokens,
            runs=runs,
            prefixes=prefixes,
            traffic=traffic,
        )
    )
    if output is not None:
        record.write(output, rows)
    tables.show_serve(rows, as_json=json)
    hold_against(known, rows)


_PREFIXES: "dict[str, tuple[Prefix, ...]]" = {
    "cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm"),
}  # fmt: skip


def _checked_prefixes(given: str) -> "tuple[Prefix, ...]":
    if given not in _PREFIXES:
        raise SettingError("--prefix", given, ", ".join(_PREFIXES))
    return _PREFIXES[given]


def prefill(
    model: o.OptionalModel = None,
    shape: o.Shape = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Length of the prompt; may be repeated.", show_default="256"),
    ] = None,
    runs: Annotated[int, typer.Option(help="Timed runs after one to warm up.")] = 5,
    prefix: Annotated[
        str,
        typer.Option(help="cold: all of the prompt is read; warm: it came before; or both."),
    ] = "both",
    device: o.Device = "auto",
    precision: o.Precision = "auto",
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """How fast prompts are read, to their first token, in this process.

    Cold, and with the prompt's beginning kept from before, as a server keeps it.
    """
    from soloist.bench import prefill as bench_prefill
    from soloist.bench import record
    from soloist.cli import tables
    from soloist.engine import EngineConfig

    checked = o.checked_precision(precision)
    o.check_only_one(shape, model)
    prefixes = _checked_prefixes(prefix)
    known = read_baseline(baseline, threshold)
    plan = bench_prefill.Plan(
        asked=EngineConfig(model or o.DEFAULT_MODEL, device, checked),
        shape=shape,
        prompt_tokens=tuple(prompt_tokens or (256,)),
        runs=runs,
        prefixes=prefixes,
    )
    rows = bench_prefill.measure(plan)
    if output is not None:
        record.write(output, rows)
    tables.show_prefill(rows, as_json=json)
    hold_against(known, rows)


def agent(
    url: _Url,
    api: _Api = "chat",
    model: _ServedModel = None,
    api_key: _ApiKey = None,
    name: _Name = None,
    turns: Annotated[int, typer.Option(help="Steps of a loop.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length of the first prompt, at four characters a token.")
    ] = 2000,
    tool_tokens: Annotated[
        int, typer.Option(help="What a tool's result adds before each further step, likewise.")
    ] = 500,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Of an answer.")] = 128,
    runs: Annotated[int, typer.Option(help="Loops that count, after one to warm up.")] = 3,
    price: Annotated[
        float | None,
        typer.Option(help="Of the server's machine, an hour.", rich_help_panel=_COST),
    ] = None,
    utilisation: Annotated[
        float,
        typer.Option(
            help="Share of the paid hours in which the machine answers.", rich_help_panel=_COST
        ),
    ] = 1.0,
    api_price: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT/NEW",
            help="Of a million tokens, such as 0.6/2.4; or PROMPT/CACHED/NEW.",
            rich_help_panel=_COST,
        ),
    ] = None,
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Time and cost of an agent's steps: a growing conversation with any OpenAI-compatible server.

    Each step sends all that was said, the answers included, and what a tool returned.
    """
    from soloist.bench import agent as bench_agent
    from soloist.bench import record
    from soloist.cli import tables
    from soloist.planning.cost import read_api_prices, read_machine

    machine = None if price is None else read_machine(price, utilisation)
    if machine is None and utilisation != 1.0:
        raise SettingError("--utilisation", utilisation, "beside --price only")
    known = read_baseline(baseline, threshold)
    plan = bench_agent.Plan(
        url=url,
        api=_checked_api(api),
        model=model,
        key=api_key,
        name=name,
        turns=turns,
        prompt_tokens=prompt_tokens,
        tool_tokens=tool_tokens,
        max_tokens=max_tokens,
        runs=runs,
        machine=machine,
        api_prices=None if api_price is None else read_api_prices(api_price),
    )
    row = bench_agent.measure(plan)
    if output is not None:
        record.write(output, [row])
    tables.show_agent(row, as_json=json)
    hold_against(known, [row])


def bandwidth(
    device: o.Device = "auto",
    output: o.Output = None,
    baseline: o.Baseline = None,
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """Read bandwidth of the memory, as the other benches measure it for MBU."""
    from soloist.bench import bandwidth as bench_bandwidth
    from soloist.bench import record
    from soloist.cli import tables

    known = read_baseline(baseline, threshold)
    row = bench_bandwidth.measure(device)
    if output is not None:
        record.write(output, [row])
    tables.show_bandwidth(row, as_json=json)
    hold_against(known, [row])


def compare(
    before: Annotated[Path, typer.Argument(help="A result file, the baseline.")],
    after: Annotated[Path, typer.Argument(help="The file to hold against it.")],
    threshold: o.Threshold = o.THRESHOLD,
    json: o.Json = False,
) -> None:
    """What became slower or faster between two result files; exit status 4 if anything is slower.

    A change counts where the medians differ by more than the threshold, and one of them is outside
    the range of the other's runs. Rows without partner are named.
    """
    from soloist.bench import record
    from soloist.bench.compare import compare as compare_rows

    _check_threshold(threshold)
    made = compare_rows(record.read(before), record.read(after), threshold)
    if json:
        print_json({**asdict(made), "regressions": len(made.regressions)})
    else:
        _show(made)
    _end(made)


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
    _end(made)


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold < 1:
        raise SettingError("--threshold", threshold, "from 0 to less than 1, such as 0.05")


def _end(made: "Comparison") -> None:
    """Without a single pair nothing was compared, which is no success."""
    if not made.differences:
        raise UserError(
            "no two rows measure the same",
            "rows are partners where model, device, precision, lengths and columns are equal",
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


def report(
    files: Annotated[list[Path], typer.Argument(help="Result files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """One HTML page with plots of result files, side by side; it needs no other file."""
    from soloist.bench import record
    from soloist.bench import report as page

    rows = {str(file): record.read(file) for file in files}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page.report(rows), encoding="utf-8")
    status(f"{output}: {sum(map(len, rows.values()))} rows")
