"""`bench serve`: time to first token and decode speed of any OpenAI-compatible server.

One greedy request at a time. How tokens can be counted is found out first, and each row says how it
was done; where a server counts nothing, its decode speed is not stated.
"""

import hashlib
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from soloist.bench import record, rows
from soloist.bench.client import Client, Target
from soloist.bench.dialect import Server, meet
from soloist.bench.sizes import require_at_least
from soloist.bench.stream import (
    Answer,
    Arrival,
    Counting,
    Span,
    arrivals,
    complete,
    decode_span,
    difference,
    first_burst,
    gaps_s,
    text_arrivals,
    token_times_s,
)
from soloist.bench.text import CHARACTERS_PER_TOKEN, python_characters
from soloist.bench.traffic import Traffic
from soloist.errors import ServerFailed, SettingError

_MOST_GUESSES = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        prompt: text; None for Python text of `prompt_tokens`.
        prompt_tokens: lengths to measure, as the server counts them.
        max_tokens: made after the prompt, if the server does not end earlier.
        runs: timed, after one that is not.
        prefixes: 'cold' for prompts that begin differently each time, 'warm' for one prompt.
        traffic: what a token makes the server's memory read, for MBU; None where it is not known.
    """

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    runs: int
    prefixes: tuple[rows.Prefix, ...]
    traffic: Traffic | None = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What to send: warm always the same, cold with another first line each time.

    Attributes:
        text: all but the first line.
        warm_line: the first line of a warm one, as long as that of a cold one; or nothing.
    """

    text: str
    warm_line: str

    def of(self, prefix: rows.Prefix) -> str:
        """What to send now."""
        return (_line(uuid.uuid4()) if prefix == "cold" else self.warm_line) + self.text


def _line(name: uuid.UUID) -> str:
    return f"# {name.hex}\n"


@dataclass(frozen=True, slots=True)
class _Run:
    """One timed request; and a short one beside it where the difference counts tokens."""

    long: Answer
    short: Answer | None


def measure(plan: Plan, targets: Sequence[Target]) -> list[rows.ServeRow]:
    """A row of each server for each length of prompt and each kind of prefix.

    Servers take turns run by run: a slow minute hits all of them.

    Args:
        plan: the same for all.
        targets: at least one server.

    Raises:
        SettingError: sizes that cannot be measured.
        ServerFailed: a server cannot be reached, refuses, or answers without a token.
    """
    made: list[rows.ServeRow] = []
    _check(plan)
    with ExitStack() as stack:
        servers = [meet(stack.enter_context(Client(target))) for target in targets]
        for length in (None,) if plan.prompt is not None else plan.prompt_tokens:
            prompts = [
                _Prompt(plan.prompt or "", "") if length is None else _prompt_of(server, length)
                for server in servers
            ]
            for prefix in plan.prefixes:
                runs: list[list[_Run]] = [[] for _ in targets]
                for _ in range(plan.runs + 1):
                    for of_one, server, prompt in zip(runs, servers, prompts, strict=True):
                        of_one.append(_run(server, prompt, prefix, plan.max_tokens))
                made += [
                    _row(plan, server, length, prefix, of_one[1:])
                    for server, of_one in zip(servers, runs, strict=True)
                ]
    return made


def _check(plan: Plan) -> None:
    require_at_least(
        *(("--prompt-tokens", length, 1) for length in plan.prompt_tokens),
        ("--max-tokens", plan.max_tokens, 2),
        ("--runs", plan.runs, 1),
    )
    if plan.prompt == "":
        raise SettingError("--prompt", "", "text")


def _prompt_of(server: Server, tokens: int) -> _Prompt:
    """Python text that the server counts as about so many tokens, what surrounds it included."""
    warm_line = _line(uuid.uuid5(uuid.NAMESPACE_URL, "warm"))
    count = tokens * CHARACTERS_PER_TOKEN
    for _ in range(_MOST_GUESSES):
        answer = server.ask(_Prompt(python_characters(count), warm_line).of("cold"), 1)
        if not answer.prompt_tokens:
            break
        missing = tokens - answer.prompt_tokens
        if abs(missing) <= tokens // 100:
            break
        count = max(1, count + round(missing * count / answer.prompt_tokens))
    return _Prompt(python_characters(count), warm_line)


def _run(server: Server, prompt: _Prompt, prefix: rows.Prefix, max_tokens: int) -> _Run:
    short = None
    if server.counting is Counting.FINAL_USAGE:
        short = server.ask(prompt.of(prefix), 1)
    long = server.ask(prompt.of(prefix), max_tokens)
    run = _Run(long, short)
    if not _arrivals(run, server.counting):
        raise ServerFailed(server.client.url, "it answered without a single token")
    return run


def _arrivals(run: _Run, counting: Counting) -> list[Arrival]:
    if run.short is not None:
        return text_arrivals(run.long, run.short)
    return arrivals(run.long, counting)


def _span(run: _Run, counting: Counting) -> Span | None:
    if run.short is not None:
        return difference(run.long, run.short)
    return decode_span(arrivals(run.long, counting))


def _row(
    plan: Plan, server: Server, asked: int | None, prefix: rows.Prefix, runs: list[_Run]
) -> rows.ServeRow:
    found = [_arrivals(run, server.counting) for run in runs]
    spans = [_span(run, server.counting) for run in runs]
    speeds = [span.tokens_per_s for span in spans if span is not None]
    is_known = len(speeds) == len(runs)
    speed = rows.Spread.of(speeds) if is_known else None
    read = _median([run.long.prompt_tokens for run in runs])
    new = _median([_made(run, server.counting) for run in runs])
    moved = None
    if plan.traffic is not None and read is not None and new is not None:
        moved = plan.traffic.bytes_at(read + new // 2)
    told = [run.long.timings for run in runs]
    own_speeds = complete([timings.tokens_per_s for timings in told])
    own_mbus = complete([timings.mbu for timings in told])
    mbu = mbu_by = bandwidth = None
    if plan.traffic is not None:
        bandwidth = plan.traffic.bandwidth / 1e9
        if moved is not None and speed is not None:
            mbu, mbu_by = moved * speed.median / plan.traffic.bandwidth, "what was given"
    elif own_mbus:
        mbu, mbu_by, bandwidth = median(own_mbus), "the server", told[0].bandwidth_gb_per_s
    hashes = {hashlib.sha256(run.long.text.encode()).hexdigest()[:16] for run in runs}
    token_times = [t * 1e3 for of_run in found for t in token_times_s(of_run)]
    gaps = [t * 1e3 for of_run in found for t in gaps_s(of_run)]
    return rows.ServeRow(
        bench="serve",
        engine=server.client.name,
        url=server.client.url,
        api=server.client.api,
        shape=server.model,
        prefix=prefix,
        asked_prompt_tokens=asked,
        prompt_tokens=read,
        cached_tokens=_median([run.long.cached_tokens for run in runs]),
        max_tokens=plan.max_tokens,
        new_tokens=new,
        runs=len(runs),
        counting=server.counting,
        ttft_ms=rows.Spread.of([of_run[0].at_s * 1e3 for of_run in found]),
        first_tokens=_median([first_burst(of_run).num_tokens for of_run in found]),
        decode_tokens_per_s=speed,
        no_decode_speed=None if is_known else _why_not(server.counting),
        token_ms=rows.Percentiles.of(token_times) if token_times else None,
        gap_ms=rows.Percentiles.of(gaps) if gaps else None,
        text_sha256=" ".join(sorted(hashes)) if prefix == "warm" else "",
        fields=tuple(sorted(server.fields)),
        server_tokens_per_s=rows.Spread.of(own_speeds) if own_speeds else None,
        streamed_bytes_per_token=moved,
        bandwidth_gb_per_s=bandwidth,
        mbu=None if mbu is None else round(mbu, 3),
        mbu_by=mbu_by,
        **record.origin("httpx2"),
    )


def _made(run: _Run, counting: Counting) -> int | None:
    last = arrivals(run.long, counting)[-1].num_tokens
    return run.long.new_tokens if last is None else last


def _why_not(counting: Counting) -> str:
    if counting is Counting.NONE:
        return "the server counts no tokens: neither usage nor token ids"
    return "an answer came at once, or was too short"


def _median(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if known else None
