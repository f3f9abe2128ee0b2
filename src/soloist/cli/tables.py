"""Tables for people: rich where stdout is a terminal, plain aligned text where it is not."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from soloist.errors import gigabytes, visible

if TYPE_CHECKING:
    from soloist.bench.rows import (
        AccuracyRow,
        AgentRow,
        BandwidthRow,
        Clocks,
        DecodeRow,
        NeighboursRow,
        Percentiles,
        PrefillRow,
        ServeRow,
        Spread,
        StartupRow,
    )

_Row = TypeVar("_Row")


def show_facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, names and values."""
    title = visible(title)
    rows = [(visible(name), visible(value)) for name, value in rows]
    if not sys.stdout.isatty():
        width = max(len(name) for name, _ in rows)
        print(title)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))  # no markup
    Console().print(table)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Several columns; the first is text, the others are figures."""
    rows = [[visible(cell) for cell in row] for row in rows]
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
    from rich.text import Text

    rich_table = Table()
    for i, heading in enumerate(headings):
        rich_table.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        rich_table.add_row(*map(Text, row))  # no markup
    Console().print(rich_table)


def show_columns(rows: Sequence[_Row], *columns: tuple[str, Callable[[_Row], str]]) -> None:
    """A table by its columns: each heading with what a row has there."""
    cells = [tuple(cell(row) for _, cell in columns) for row in rows]
    show_table([heading for heading, _ in columns], cells)


def show_decode(rows: "Sequence[DecodeRow]") -> None:
    """Time to first token and decode speed of each engine."""
    first = rows[0]
    wide = ""
    if first.columns > 1:
        wide = f" · {first.columns} columns a step, of {first.sequences} sequence"
        wide += "s" * (first.sequences > 1)
    if first.start_position not in (None, first.prompt_tokens):
        wide += f" · decode from position {first.start_position:,}"
    print(
        f"{first.shape} · {_stored(first)}{_kept(first)} · {first.device} · "
        f"{first.prompt_tokens} prompt + "
        f"{first.new_tokens} new tokens{f' of {first.text}' if first.text else ''}{wide} · "
        f"{first.runs} runs · reads at "
        f"{first.bandwidth_gb_per_s} GB/s · "
        f"{f'sampled at temperature {first.temperature:g}' if first.temperature else 'greedy'}"
    )
    drafting: list[tuple[str, Callable[[DecodeRow], str]]] = []
    if any(row.speculation for row in rows):
        drafting = [("drafts", _drafting), ("right", _accepted), ("tokens a step", _per_round)]
    others: list[tuple[str, Callable[[DecodeRow], str]]] = []
    if any(row.beside_tokens_per_s is not None for row in rows):
        others = [("each of the others", lambda row: _median(row.beside_tokens_per_s))]
    show_columns(
        rows,
        ("engine", lambda row: row.engine),
        *drafting,
        ("TTFT ms", lambda row: _median(row.ttft_ms)),
        ("decode tokens/s", lambda row: _median(row.decode_tokens_per_s)),
        ("min – max", lambda row: _range(row.decode_tokens_per_s)),
        ("MBU", lambda row: f"{row.mbu:.0%}"),
        *others,
    )
    for row in rows:
        if row.token_ms is not None:
            print(f"{row.engine}: a token every {percentiles(row.token_ms)} ms (50, 90, 99 %)")
        if row.chosen_experts is not None:
            print(
                f"{row.engine}: a step's columns chose {row.chosen_experts:.1f} experts of a layer"
            )
    show_clocks(first.clocks)


def _drafting(row: "DecodeRow") -> str:
    if row.wrong is None:
        return row.drafting or "none"
    return f"{row.drafting}, {row.wrong:.0%} wrong"


def _accepted(row: "DecodeRow") -> str:
    return "–" if row.accepted is None else f"{row.accepted:.0%}"


def _per_round(row: "DecodeRow") -> str:
    return "–" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"


def percentiles(p: "Percentiles | None") -> str:
    """Three of them."""
    return "–" if p is None else f"{p.p50:.2f} / {p.p90:.2f} / {p.p99:.2f}"


def _median(spread: "Spread | None", form: str = ".1f") -> str:
    return "–" if spread is None else format(spread.median, form)


def _range(spread: "Spread | None", form: str = ".1f") -> str:
    return "–" if spread is None else f"{spread.min:{form}} – {spread.max:{form}}"


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _figure(value: float | None, form: str = ",.1f") -> str:
    return "–" if value is None else format(value, form)


def _size(value: int | None) -> str:
    return "–" if value is None else gigabytes(value)


def show_clocks(clocks: "Clocks | None") -> None:
    """A line about the GPU, where NVML reports anything."""
    if clocks is None:
        return
    print(
        f"GPU: SM clock {_range(clocks.sm_mhz, ',.0f')} MHz, memory "
        f"{clocks.memory_mhz.median:,.0f} MHz, up to {clocks.temperature_c.max:.0f} °C and "
        f"{clocks.power_w.max:.0f} W, throttled by: {', '.join(clocks.throttling) or 'nothing'}"
    )


def _stored(row: "DecodeRow | PrefillRow | StartupRow | AccuracyRow") -> str:
    return stored_words(row.weights, row.precision)


def _kept(row: "DecodeRow | PrefillRow | AccuracyRow") -> str:
    """How keys and values are stored, where that is not the precision."""
    return f" · KV cache {row.kv}" if row.kv else ""


def stored_words(weights: str, precision: str) -> str:
    """The precision, and weights where they are in another."""
    return precision if weights in ("", precision) else f"{weights} in {precision}"


def show_prefill(rows: "Sequence[PrefillRow]") -> None:
    """How fast prompts are read."""
    first = rows[0]
    print(
        f"{first.shape} · {_stored(first)}{_kept(first)} · {first.device} · from token ids to the "
        f"first token · median of {first.runs} runs"
    )
    show_columns(
        rows,
        ("prefix", lambda row: row.prefix),
        ("prompt", lambda row: f"{row.prompt_tokens:,}"),
        ("cached", lambda row: f"{row.cached_tokens:,}"),
        ("TTFT ms", lambda row: _median(row.ttft_ms)),
        ("min – max", lambda row: _range(row.ttft_ms)),
        ("tokens/s read", lambda row: _median(row.prompt_tokens_per_s, ",.0f")),
        *_gaps(rows),
    )
    show_clocks(first.clocks)


def _gaps(rows: "Sequence[PrefillRow]") -> "list[tuple[str, Callable[[PrefillRow], str]]]":
    """What streams beside the prompt waited, where there were any."""
    if rows[0].longest_gap_ms is None:
        return []
    return [
        ("streams", lambda row: str(row.streams)),
        ("longest gap ms", lambda row: _median(row.longest_gap_ms)),
        ("min – max", lambda row: _range(row.longest_gap_ms)),
    ]


def show_startup(rows: "Sequence[StartupRow]") -> None:
    """Times to the first token of a fresh process."""
    first = rows[0]
    print(
        f"{first.shape} · {_stored(first)} · {first.device} · {first.executor} · from the start "
        f"of {first.program} to its first {'text of a chat' if first.ready_s else 'token'} · "
        f"median of {first.runs} runs, in seconds"
    )

    def kernels(row: "StartupRow") -> str:
        return "none needed" if row.executor == "reference" else f"{row.kernel_cache} cache"

    parts: tuple[tuple[str, Callable[[StartupRow], str]], ...] = (
        ("weights", lambda row: _median(row.weights_s, ".2f")),
        ("compiling", lambda row: _median(row.kernels_s, ".2f")),
        ("rest", lambda row: _median(row.rest_s, ".2f")),
    )
    if first.ready_s is not None:
        parts = (("until ready", lambda row: _median(row.ready_s, ".2f")), parts[1])
    show_columns(
        rows,
        ("kernels", kernels),
        ("total", lambda row: _median(row.total_s, ".2f")),
        ("min – max", lambda row: _range(row.total_s, ".2f")),
        *parts,
        ("compiled", lambda row: str(row.kernels_built)),
    )
    if first.checkpoint_bytes and first.gpu_memory_bytes and first.kv_cache_bytes:
        apart = first.gpu_memory_bytes - first.kv_cache_bytes
        print(
            f"weights of {gigabytes(first.checkpoint_bytes)} in files · takes {gigabytes(apart)} "
            f"of GPU memory, and {gigabytes(first.kv_cache_bytes)} for the KV cache"
        )


def show_accuracy(rows: "Sequence[AccuracyRow]") -> None:
    """Distances from fp32."""
    first = rows[0]
    print(
        f"{first.shape} · {_stored(first)}{_kept(first)} · {first.device} · "
        f"{first.positions} teacher-forced positions of {first.text} · against fp32 arithmetic"
    )
    show_columns(
        rows,
        ("engine", lambda row: row.engine),
        ("fp32 on weights", lambda row: row.fp32_weights),
        ("mean KL", lambda row: f"{row.mean_kl:.1e}"),
        ("largest KL", lambda row: f"{row.max_kl:.1e}"),
        ("NLL", lambda row: f"{row.nll:.4f}"),
        ("NLL − fp32's", lambda row: f"{row.nll_difference:+.1e}"),
        ("± std. error", lambda row: f"{row.nll_standard_error:.1e}"),
        ("same top 1", lambda row: f"{row.top_1_agreement:.1%}"),
    )
    if first.kv:
        show_columns(
            first.by_position,
            ("positions", lambda part: f"{part.first:,} … {part.stop - 1:,}"),
            ("mean KL", lambda part: f"{part.mean_kl:.1e}"),
            ("NLL", lambda part: f"{part.nll:.4f}"),
            ("NLL − fp32's", lambda part: f"{part.nll_difference:+.1e}"),
            ("± std. error", lambda part: f"{part.nll_standard_error:.1e}"),
        )
    for row in rows:
        if row.same_bits:
            print(f"{row.engine}: the same bits in {', '.join(row.same_bits)}")
        if row.repeats:
            print(f"{row.engine}: {row.repeats:,} launches of 64 tokens gave the same bits")


def show_bandwidth(rows: "Sequence[BandwidthRow]") -> None:
    """How fast devices read."""
    for row in rows:
        show_facts(
            row.device,
            [
                ("reads", f"{_median(row.gb_per_s, ',.1f')} GB/s, median of {row.runs}"),
                ("min – max", f"{_range(row.gb_per_s, ',.1f')} GB/s"),
                ("by", row.method),
            ],
        )


def show_serve(rows: "Sequence[ServeRow]") -> None:
    """What a client saw of a server."""
    first = rows[0]
    print(f"{first.shape} · {first.api} · up to {first.max_tokens} new tokens · {first.runs} runs")
    for engine, counting in {row.engine: row.counting for row in rows}.items():
        print(f"{engine}: tokens counted by: {counting}")
    show_columns(
        rows,
        ("server", lambda row: row.engine),
        ("prefix", lambda row: row.prefix),
        ("prompt", lambda row: _count(row.prompt_tokens)),
        ("cached", lambda row: _count(row.cached_tokens)),
        ("new", lambda row: _count(row.new_tokens)),
        ("TTFT ms", lambda row: _median(row.ttft_ms)),
        ("first chunk", lambda row: _count(row.first_tokens)),
        ("decode tokens/s", lambda row: _median(row.decode_tokens_per_s)),
        ("min – max", lambda row: _range(row.decode_tokens_per_s)),
        ("token ms 50/90/99 %", lambda row: percentiles(row.token_ms)),
        ("gap ms 50/90/99 %", lambda row: percentiles(row.gap_ms)),
    )
    for row in rows:
        which = f"{row.engine}, {row.prefix}, {_count(row.prompt_tokens)}"
        if row.mbu is not None:
            print(f"{which}: MBU {row.mbu:.0%} of {row.bandwidth_gb_per_s} GB/s, by {row.mbu_by}")
        if row.server_tokens_per_s is not None:
            own = _median(row.server_tokens_per_s)
            print(f"{which}: by the server's own clock {own} tokens/s")
    for reason in {row.no_decode_speed for row in rows if row.no_decode_speed}:
        print(f"no decode speed: {reason}")


def show_agent(rows: "Sequence[AgentRow]") -> None:
    """What an agent's loop waits for, step by step."""
    for row in rows:
        _show_loop(row)


def _show_loop(row: "AgentRow") -> None:
    print(
        f"{row.shape} · {row.engine} · {row.api} · {row.turns} steps, each with up to "
        f"{row.max_tokens} new tokens and about {row.tool_tokens} of a tool · median of "
        f"{row.runs} loops · tokens counted by: {row.counting}"
    )
    show_table(
        ("step", "prompt", "cached", "new", "TTFT ms", "decode tokens/s", "step ms"),
        [
            (
                str(number), _count(t.prompt_tokens), _count(t.cached_tokens), _count(t.new_tokens),
                _figure(t.ttft_ms), _figure(t.decode_tokens_per_s), _figure(t.step_ms),
            )
            for number, t in enumerate(row.by_turn, 1)
        ],
    )  # fmt: skip
    print(
        f"a loop {_median(row.loop_s, '.2f')} s ({_range(row.loop_s, '.2f')}), a step "
        f"{percentiles(row.step_ms)} ms (50, 90, 99 %)"
    )
    if row.machine_cost_per_step is not None:
        print(
            f"cost a step, by the machine: {row.machine_cost_per_step:.3g} = "
            f"{row.mean_step_ms / 1e3:.3g} s × {row.price_per_hour:g} an hour / 3600 / "
            f"{row.utilisation:g}"
        )
    if row.api_prices is not None:
        prompt, cached, new = row.api_prices
        shown = "–, tokens are not counted"
        if row.api_cost_per_step is not None:
            shown = f"{row.api_cost_per_step:.3g}"
        print(
            f"cost a step, by the API: {shown} (a million prompt tokens {prompt:g}, cached "
            f"{cached:g}, new {new:g})"
        )


def show_neighbours(rows: "Sequence[NeighboursRow]") -> None:
    """What other requests do to a stream."""
    first = rows[0]
    memory = f" · memory of {first.process} and its descendants" if first.process else ""
    print(
        f"{first.shape} · {first.engine} · {first.api} · a stream of up to {first.max_tokens} new "
        f"tokens, alone and beside one neighbour · {first.runs} runs · tokens counted by: "
        f"{first.counting}{memory}"
    )
    show_columns(
        rows,
        ("neighbour", lambda row: row.neighbour),
        ("body", lambda row: _size(row.neighbour_bytes or None)),
        ("tokens/s", lambda row: _median(row.decode_tokens_per_s)),
        ("of alone", lambda row: _figure(row.share_of_alone, ".0%")),
        ("gap ms 99 %", lambda row: "–" if row.gap_ms is None else f"{row.gap_ms.p99:,.1f}"),
        ("worst", lambda row: "–" if row.gap_ms is None else f"{row.gap_ms.max:,.1f}"),
        ("same text", lambda row: "yes" if row.same_text else "NO"),
        ("answered", lambda row: " ".join(sorted({*row.neighbour_statuses})) or "–"),
        ("in s", lambda row: _median(row.neighbour_s, ".2f")),
        (
            "worst health ms",
            lambda row: "–" if row.health_ms is None else f"{row.health_ms.max:,.1f}",
        ),
        ("memory before", lambda row: _size(row.memory_before_bytes)),
        ("peak", lambda row: _size(row.memory_peak_bytes)),
        ("after", lambda row: _size(row.memory_after_bytes)),
        ("a body's byte", lambda row: _figure(row.memory_per_body_byte, ".1f")),
    )
    for row in rows:
        for error in row.stream_errors:
            print(f"beside {row.neighbour} the stream broke: {error}")
