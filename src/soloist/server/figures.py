"""Usage and timings as clients read them: all from the engine, none from chunks."""

from collections.abc import Callable, Mapping, Sequence

import orjson

from soloist.engine import Completion, Timings
from soloist.server.fields import GenerationFields
from soloist.server.generation import Delta, Generation
from soloist.server.host import Ready
from soloist.server.problems import Problem
from soloist.server.sse import event


def usage(ends: Sequence[Completion], ready: Ready, prompts: int = 1) -> dict[str, object]:
    """OpenAI's usage of all answers together, and figures of the one that took longest.

    Groq's four times (in seconds), and what they leave out.

    Args:
        ends: one for each answer; answers to one prompt lie side by side.
        ready: what made them.
        prompts: how many prompts they answer.
    """
    one_of_each = ends[:: len(ends) // prompts]
    prompt_tokens = sum(end.timings.prompt_tokens for end in one_of_each)
    cached_tokens = sum(end.timings.cached_tokens for end in one_of_each)
    new_tokens = sum(end.timings.new_tokens for end in ends)
    forced_tokens = sum(end.timings.forced_tokens for end in ends)
    drafts = [end.timings.drafts for end in ends]
    details = _details(cached_tokens, forced_tokens, sum(d.accepted for d in drafts))
    accepted = sum(d.predicted_accepted for d in drafts)
    details["completion_tokens_details"] |= {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(d.predicted for d in drafts) - accepted,
    }
    longest = max((end.timings for end in ends), key=lambda t: t.total_s)
    return {
        **token_usage(prompt_tokens, new_tokens),
        **details,
        "queue_time": longest.queue_s,
        "prompt_time": longest.ttft_s - longest.queue_s,
        "completion_time": longest.decode_s,
        "total_time": longest.total_s,
        "time_to_first_token": longest.ttft_s,
        "decode_tokens_per_second": longest.decode_tokens_per_s,
        "mbu": longest.mbu(ready.engine.report.bandwidth_gb_per_s),
        "device": ready.engine.report.device_name,
    }


def token_usage(prompt_tokens: int, new_tokens: int) -> dict[str, object]:
    """The counts alone."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def _details(
    cached_tokens: int, forced_tokens: int, drafted_tokens: int
) -> dict[str, dict[str, int]]:
    """Of the counts: cached tokens of the prompt, forced and drafted ones of the answer."""
    return {
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "forced_tokens": forced_tokens,
            "drafted_tokens": drafted_tokens,
        },
    }


def usage_so_far(
    asked: GenerationFields, prompt_tokens: int, cached_tokens: int, latest: Mapping[int, Delta]
) -> bytes:
    """The usage in a chunk of a stream, as JSON of a further field, if there is one.

    Args:
        asked: says whether it is wanted.
        prompt_tokens: of all prompts together.
        cached_tokens: of these.
        latest: of each answer that has begun.
    """
    if not asked.counts_on:
        return b',"usage":null' if asked.includes_usage else b""
    made = sum(delta.num_made for delta in latest.values())
    forced = sum(delta.num_forced for delta in latest.values())
    drafted = sum(delta.num_drafted for delta in latest.values())
    counts = token_usage(prompt_tokens, made) | _details(cached_tokens, forced, drafted)
    return b',"usage":' + orjson.dumps(counts)


def last_words(
    generation: Generation, ready: Ready, prompts: int = 1
) -> Callable[[Problem], bytes]:
    """The event of an error: as OpenAI's clients read it, and what was made until then.

    Usage and timings are there where every answer has its end, as cancelled ones have.
    """

    def words(problem: Problem) -> bytes:
        ends = [generation.ends[i] for i in sorted(generation.ends)]
        if len(ends) < len(generation.requests):
            return event(problem.body())
        made = {"usage": usage(ends, ready, prompts), "timings": timings(ends[0].timings, ready)}
        return event(problem.body() | made)

    return words


def timings(t: Timings, ready: Ready) -> dict[str, object]:
    """llama.cpp's object, and what it does not have: gaps, queue, TTFT, memory bandwidth, device.

    `mbu` and `bandwidth_gb_per_s` are null where the device's bandwidth was not measured. One of
    several replicas tells its name, and the requests that run and wait in it now.
    """
    read, read_s = t.prompt_tokens - t.cached_tokens, t.ttft_s - t.queue_s
    speed, bandwidth = t.decode_tokens_per_s, ready.engine.report.bandwidth_gb_per_s
    return {
        "cache_n": t.cached_tokens,
        "prompt_n": read,
        "prompt_ms": read_s * 1e3,
        "prompt_per_token_ms": read_s * 1e3 / read if read else None,
        "prompt_per_second": read / read_s if read_s > 0 else None,
        "predicted_n": t.new_tokens,
        "forced_n": t.forced_tokens,
        "draft_n": t.drafts.drafted,
        "draft_n_accepted": t.drafts.accepted,
        "tokens_per_step": t.tokens_per_round,
        "predicted_ms": t.decode_s * 1e3,
        "predicted_per_token_ms": None if speed is None else 1e3 / speed,
        "predicted_per_second": speed,
        "longest_gap_ms": t.longest_gap_s * 1e3,
        "queue_ms": t.queue_s * 1e3,
        "ttft_ms": t.ttft_s * 1e3,
        "total_ms": t.total_s * 1e3,
        "predicted_bytes": t.decode_bytes,
        "bandwidth_gb_per_s": bandwidth,
        "mbu": t.mbu(bandwidth),
        "device": ready.engine.report.place,
        "executor": ready.engine.report.executor,
        **_replica(ready),
    }


def _replica(ready: Ready) -> dict[str, object]:
    if ready.replica is None:
        return {}
    load = ready.loop.load
    return {
        "replica": ready.replica,
        "replica_requests_running": load.num_running,
        "replica_requests_waiting": load.num_waiting,
    }
