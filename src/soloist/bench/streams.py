"""Reading a prompt while other requests stream: what it waits for, and what they wait for."""

from collections.abc import Iterator
from dataclasses import dataclass

from soloist.engine.core import EngineCore
from soloist.engine.events import Completion, Failure, Timings
from soloist.engine.executor import Executor
from soloist.engine.request import Request
from soloist.errors import SettingError
from soloist.sampling import Sampler, SamplingParams

# Streams go on for so many tokens before the prompt comes.
_BEFORE_TOKENS = 32
# Of a stream's own prompt.
_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Beside:
    """What became of one prompt beside streams.

    Attributes:
        ttft_s: request accepted → first token known.
        num_cached: tokens of the prompt that were cached.
        longest_gap_s: the longest time between two tokens of one stream.
    """

    ttft_s: float
    num_cached: int
    longest_gap_s: float


def require_room(executor: Executor, num_streams: int) -> None:
    """Refuse streams that cannot run beside the request that is measured.

    Raises:
        SettingError: the executor runs fewer requests at once.
    """
    if num_streams >= executor.max_running:
        raise SettingError("--streams", num_streams, f"at most {executor.max_running - 1} here")


def read_beside(
    executor: Executor, vocab_size: int, ids: list[int], num_streams: int, most_tokens: int
) -> Beside:
    """Read a prompt while `num_streams` greedy answers go on; nobody drafts.

    Args:
        executor: with room for all of them; nobody else uses it.
        vocab_size: V.
        ids: of the prompt.
        num_streams: at least one.
        most_tokens: prompt and answer of a stream; enough until the prompt is read.

    Raises:
        SettingError: a stream had all of its tokens before the prompt was read.
        RequestError, DeviceError: a request failed.
    """
    core = EngineCore(executor, most_waiting=num_streams + 1)
    most_new = most_tokens - _PROMPT_TOKENS
    prompts = [_own_prompt(number, vocab_size) for number in range(num_streams)]
    streams = [_request(prompt, vocab_size, most_new) for prompt in prompts]
    reader: Request | None = None
    for stream in streams:
        core.submit(stream)
    for _ in _steps(core):
        if reader is None and all(s.answer.num_made >= _BEFORE_TOKENS for s in streams):
            reader = _request(ids, vocab_size, 1)
            core.submit(reader)
        if all(s.is_finished for s in streams):
            break
        if reader is not None and reader.is_finished:
            for stream in streams:
                stream.cancel()
    told = [_timings(stream) for stream in streams]
    if reader is None or any(t.new_tokens >= most_new for t in told):
        raise SettingError(
            "--streams", num_streams,
            f"0 with so long a prompt: {most_tokens:,} tokens of a stream took less time",
        )  # fmt: skip
    own = _timings(reader)
    return Beside(own.ttft_s, own.cached_tokens, max(t.longest_gap_s for t in told))


def _own_prompt(number: int, vocab_size: int) -> list[int]:
    """Of a stream: no two begin alike."""
    return [(7 + 13 * number + 31 * i) % vocab_size for i in range(_PROMPT_TOKENS)]


def _request(ids: list[int], vocab_size: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(ids, Sampler(params, vocab_size, ids))


def _steps(core: EngineCore) -> Iterator[None]:
    """Every step and every round, until nothing is left to do."""
    while (step := core.next()) is not None:
        for _ in core.do(step):
            yield
        yield


def _timings(request: Request) -> Timings:
    events = request.take()
    for event in events:
        if isinstance(event, Failure):
            raise event.error
    completion = events[-1]
    assert isinstance(completion, Completion), "it has ended"
    return completion.timings
