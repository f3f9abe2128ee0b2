"""`bench agent`: an agent's loop against any OpenAI-compatible server, step by step.

A conversation grows: each step sends all of it, the server's own answers included, and behind them
what a tool returned. What a step takes is what a person, or a program, waits for: from sending the
request to the end of the answer.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median

from soloist.bench import record, rows
from soloist.bench.client import Api, Client, Prompt, Target
from soloist.bench.dialect import Server, meet
from soloist.bench.sizes import require_at_least
from soloist.bench.stream import Answer, Counting, arrivals, complete, decode_span
from soloist.bench.text import CHARACTERS_PER_TOKEN, python_characters
from soloist.errors import ServerFailed
from soloist.planning.cost import ApiPrices, Machine

_TASK = "Read this module, then work on it step by step; I return what your tools say."
_RETURNED = "The tool returned:"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        turns: steps of a loop.
        prompt_tokens: length of the first prompt, by about four characters a token.
        tool_tokens: by how much a tool's result makes the next prompt longer, likewise.
        max_tokens: of an answer.
        runs: loops that count, after one that does not.
        machine: what the server's time costs, or None.
        api_prices: what an API charges, or None.
    """

    turns: int
    prompt_tokens: int
    tool_tokens: int
    max_tokens: int
    runs: int
    machine: Machine | None
    api_prices: ApiPrices | None


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a loop, as the client saw it.

    Attributes:
        total_s: sent → end of the answer.
        ttft_s: sent → first token; None where nobody says which text holds one.
        tokens_per_s: decode speed; None where tokens cannot be counted on their way.
        prompt_tokens, cached_tokens, new_tokens: by usage; None without.
    """

    total_s: float
    ttft_s: float | None
    tokens_per_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    new_tokens: int | None


def measure(plan: Plan, targets: Sequence[Target]) -> list[rows.AgentRow]:
    """A row of each server for all its loops; servers take turns loop by loop.

    Args:
        plan: the same for all.
        targets: at least one server.

    Raises:
        SettingError: sizes that cannot be measured.
        ServerFailed: a server cannot be reached, refuses, or answers nothing.
    """
    require_at_least(
        ("--turns", plan.turns, 1),
        ("--prompt-tokens", plan.prompt_tokens, 1),
        ("--tool-tokens", plan.tool_tokens, 1),
        ("--max-tokens", plan.max_tokens, 1),
        ("--runs", plan.runs, 1),
    )
    with ExitStack() as stack:
        servers = [meet(stack.enter_context(Client(target))) for target in targets]
        loops: list[list[list[Step]]] = [[] for _ in targets]
        for _ in range(plan.runs + 1):
            for of_one, server in zip(loops, servers, strict=True):
                of_one.append(_loop(plan, server))
    return [_row(plan, server, of_one[1:]) for server, of_one in zip(servers, loops, strict=True)]


def _loop(plan: Plan, server: Server) -> list[Step]:
    """One conversation; its first line is a new one, so that a server has none of it in a cache."""
    size = plan.prompt_tokens * CHARACTERS_PER_TOKEN
    first = f"# {uuid.uuid4().hex}\n{_TASK}\n\n{python_characters(size)}"
    told, steps = [first], []
    for turn in range(plan.turns):
        answer = server.ask(_prompt(server.client.api, told), plan.max_tokens)
        if not answer.text and not answer.new_tokens:
            raise ServerFailed(server.client.url, "it answered without a single token")
        steps.append(_step(answer, server.counting))
        told += [_reply(answer.text, told), _tool_result(plan.tool_tokens, turn)]
    return steps


def _reply(text: str, told: Sequence[str]) -> str:
    """An answer without the conversation, which some servers send back before it.

    They send it as the model's template has it, which may put marks before lines or trim them; but
    all lines are there, in order.
    """
    end = 0
    for line in filter(None, (line.strip() for part in told for line in part.splitlines())):
        if (found := text.find(line, end)) < 0:
            return text
        end = found + len(line)
    return text[end:]


def _tool_result(tokens: int, turn: int) -> str:
    """A stretch of Python text, another one each turn."""
    size = tokens * CHARACTERS_PER_TOKEN
    return f"{_RETURNED}\n{python_characters(size * (turn + 2))[-size:]}"


def _prompt(api: Api, told: Sequence[str]) -> Prompt:
    """The conversation so far: requests and answers in turn."""
    if api == "completions":
        return "\n\n".join(told) + "\n\n"
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(told)]


def _step(answer: Answer, counting: Counting) -> Step:
    counts = counting in (Counting.CONTINUOUS_USAGE, Counting.TOKEN_IDS)
    found = arrivals(answer, counting) if counts else []
    span = decode_span(found)
    return Step(
        total_s=answer.end_s,
        ttft_s=found[0].at_s if found else None,
        tokens_per_s=None if span is None else span.tokens_per_s,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        new_tokens=answer.new_tokens if not found else found[-1].num_tokens,
    )


def _row(plan: Plan, server: Server, loops: Sequence[Sequence[Step]]) -> rows.AgentRow:
    steps = [step for loop in loops for step in loop]
    ttfts = complete([step.ttft_s for step in steps])
    speeds = [complete([step.tokens_per_s for step in loop]) for loop in loops]
    medians = [median(of_loop) for of_loop in speeds if of_loop]
    machine_cost, api_cost = _mean_costs(plan, steps)
    return rows.AgentRow(
        bench="agent",
        engine=server.client.name,
        url=server.client.url,
        api=server.client.api,
        shape=server.model,
        turns=plan.turns,
        asked_prompt_tokens=plan.prompt_tokens,
        tool_tokens=plan.tool_tokens,
        max_tokens=plan.max_tokens,
        runs=len(loops),
        counting=server.counting,
        loop_s=rows.Spread.of([sum(step.total_s for step in loop) for loop in loops], 3),
        step_ms=rows.Percentiles.of([step.total_s * 1e3 for step in steps]),
        mean_step_ms=round(mean(step.total_s for step in steps) * 1e3, 3),
        ttft_ms=rows.Percentiles.of([t * 1e3 for t in ttfts]) if ttfts else None,
        decode_tokens_per_s=rows.Spread.of(medians) if len(medians) == len(loops) else None,
        by_turn=tuple(_turn([loop[i] for loop in loops]) for i in range(plan.turns)),
        machine_cost_per_step=machine_cost,
        price_per_hour=None if plan.machine is None else plan.machine.price_per_hour,
        utilisation=None if plan.machine is None else plan.machine.utilisation,
        api_cost_per_step=api_cost,
        api_prices=None
        if plan.api_prices is None
        else (plan.api_prices.prompt, plan.api_prices.cached, plan.api_prices.new),
        fields=tuple(sorted(server.fields)),
        **record.origin("httpx2"),
    )


def _mean_costs(plan: Plan, steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Of a step, by the machine and by the API; None where a price or a count is missing."""
    machine = api = None
    if plan.machine is not None:
        machine = mean(plan.machine.cost(step.total_s) for step in steps)
    if plan.api_prices is not None:
        counted = [
            plan.api_prices.cost(step.prompt_tokens, step.cached_tokens or 0, step.new_tokens)
            for step in steps
            if step.prompt_tokens is not None and step.new_tokens is not None
        ]
        api = mean(counted) if len(counted) == len(steps) else None
    return machine, api


def _turn(steps: Sequence[Step]) -> rows.Turn:
    """The same step of all loops."""

    def middle(value: Callable[[Step], float | None]) -> float | None:
        known = complete([value(step) for step in steps])
        return round(median(known), 2) if known else None

    def count(value: Callable[[Step], int | None]) -> int | None:
        found = middle(value)
        return None if found is None else round(found)

    return rows.Turn(
        prompt_tokens=count(lambda s: s.prompt_tokens),
        cached_tokens=count(lambda s: s.cached_tokens),
        new_tokens=count(lambda s: s.new_tokens),
        step_ms=round(median(s.total_s for s in steps) * 1e3, 2),
        ttft_ms=middle(lambda s: None if s.ttft_s is None else s.ttft_s * 1e3),
        decode_tokens_per_s=middle(lambda s: s.tokens_per_s),
    )
