"""Words and figures for people (stderr) and for machines (stdout)."""

import json
import sys
from typing import TYPE_CHECKING

from soloist.errors import gigabytes, visible

if TYPE_CHECKING:  # `soloist info` prints too, and needs no torch
    from soloist.engine import Completion, Engine


def status(line: str) -> None:
    """One line beside the data."""
    print(visible(line), file=sys.stderr, flush=True)


def say(line: str) -> None:
    """One line of the data, for people; names out of files cannot steer the terminal."""
    print(visible(line))


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


def status_line(engine: "Engine") -> str:
    """What was loaded, where, and how fast."""
    r, chosen = engine.report, engine.resolved
    rate = r.checkpoint_bytes / max(r.load_s, 1e-9) / 1e9
    context = f"context {chosen.context_tokens:,}"
    if chosen.context_tokens < engine.config.context_tokens:
        context += f" of {engine.config.context_tokens:,}"
    rounded = f" · weights {r.weights_in_words}"
    weights = rounded if r.weights_in_words != chosen.dtype.value else ""
    kv = "" if chosen.kv.is_plain else f" · KV cache {chosen.kv.name}"
    runs = f"{r.executor} · " if chosen.device != "cpu" else ""
    accepted = f" · accepted fields: {', '.join(r.accepted_fields)}" if r.accepted_fields else ""
    name = f"{r.folder.name} + adapter {r.adapter}" if r.adapter else r.folder.name
    return (
        f"{name} · {engine.config.family} · {millions(r.num_parameters)} parameters · "
        f"{chosen.dtype.value}{weights}{kv} on {r.place} · {runs}{context} · "
        f"loaded {gigabytes(r.checkpoint_bytes)} at {rate:.2g} GB/s{accepted}"
    )


def figures(completion: "Completion") -> str:
    """Time to first token and decode speed, apart; then totals."""
    t = completion.timings
    speed = t.decode_tokens_per_s
    cached = f" ({t.cached_tokens:,} cached)" if t.cached_tokens else ""
    parts = [
        f"TTFT {t.ttft_s * 1e3:.1f} ms" if t.new_tokens else "no token",
        f"decode {speed:.1f} tokens/s" if speed is not None else "decode –",
        f"{t.prompt_tokens:,} prompt{cached} + {t.new_tokens:,} new tokens",
        *_drafts(completion),
        f"total {t.total_s:.2f} s",
        f"finished: {completion.finish_reason}",
    ]
    if completion.seed is not None:
        parts.append(f"seed {completion.seed}")
    return " · ".join(parts)


def _drafts(completion: "Completion") -> list[str]:
    """What drafts brought, if there were any."""
    t, drafts = completion.timings, completion.timings.drafts
    if not drafts.rounds or t.tokens_per_round is None:
        return []
    accepted = f"{drafts.accepted:,} of {drafts.drafted:,} drafted tokens accepted"
    return [f"{accepted}, {t.tokens_per_round:.2f} tokens a step"]


def millions(count: int) -> str:
    """Parameters for people: '12.8 M', '8.03 B', '1.03 T'."""
    unit, size = next(
        (at for at in (("T", 1e12), ("B", 1e9)) if count >= 0.9995 * at[1]), ("M", 1e6)
    )
    return f"{count / size:.3g} {unit}"
