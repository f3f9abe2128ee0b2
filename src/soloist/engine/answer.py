"""One request's answer while it grows: tokens in, text and figures out."""

from soloist.engine.events import Chunk, Completion, FinishReason, Timings
from soloist.sampling import Sampler
from soloist.sampling.logprobs import TokenLogprobs
from soloist.speculation import Draft, Tally
from soloist.text import TextStream


class Answer:
    """Collects tokens, asks whether the request is over, tells what happened and how fast.

    Attributes:
        finish_reason: None while the request goes on.
        decode_bytes: see `Timings`.
        num_forced: see `Chunk`.
        drafts: what became of drafts.

    Args:
        sampler: of the request.
        prompt_tokens: tokens read.
        accepted: time of acceptance, by `time.perf_counter`.
        text: takes the tokens; without one there is no text, and no stop string.
        scores_end: give log probabilities of the token that ends the request, too.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt_tokens: int,
        accepted: float,
        text: TextStream | None = None,
        *,
        scores_end: bool = False,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.decode_bytes = self.num_forced = 0
        self.drafts = Tally()
        self._stream, self._pieces = text, list[str]()
        self._sampler, self._prompt_tokens = sampler, prompt_tokens
        self._scores_end = scores_end
        self._accepted = self._started = self._first = self._last = accepted
        self._made: list[int] = []
        self._longest_gap_s = 0.0

    @property
    def num_made(self) -> int:
        """Tokens taken."""
        return len(self._made)

    def count_draft(self, draft: Draft, num_accepted: int) -> None:
        """A draft was checked, and so many of its tokens are tokens of the answer."""
        self.drafts = self.drafts.with_draft(draft, num_accepted)

    def start(self, now: float) -> None:
        """Work on the request begins."""
        self._started = now

    def take(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        now: float,
        *,
        is_forced: bool = False,
        is_drafted: bool = False,
    ) -> Chunk:
        """The next token; sets `finish_reason` if it is the last one."""
        self.num_forced += is_forced
        if not self._made:
            self._first = self._last = now
        self._longest_gap_s = max(self._longest_gap_s, now - self._last)
        self._last = now
        self._made.append(token_id)
        stop_test = self._sampler.stop_test
        is_shown = token_id not in stop_test.ending_ids
        piece = self._stream.push([token_id]) if is_shown and self._stream is not None else ""
        self.finish_reason = stop_test.finish_reason(
            token_id, len(self._made), is_complete=self._stop is not None or self._has_form
        )
        if piece:
            self._pieces.append(piece)
        is_scored = logprobs is not None and (is_shown or self._scores_end)
        scores = (logprobs,) if is_scored and logprobs is not None else ()
        return Chunk(piece, (token_id,), scores, int(is_forced), int(is_drafted))

    def take_none(self, now: float) -> None:
        """The prompt is read, and no token wanted."""
        self._first = self._last = now
        self.finish_reason = "length"

    @property
    def _stop(self) -> str | None:
        return None if self._stream is None else self._stream.stopped

    @property
    def _has_form(self) -> bool:
        return self._sampler.is_complete and len(self._made) == len(self._sampler.output_ids)

    def finish(self, now: float, num_cached: int) -> tuple[Chunk | None, Completion]:
        """Text that was held back, if any, and the end; cancelled if nothing else ended it.

        Args:
            now: by `time.perf_counter`.
            num_cached: tokens of the prompt that did not have to be read.
        """
        rest = "" if self._stream is None else self._stream.finish()
        if rest:
            self._pieces.append(rest)
        completion = Completion(
            text="".join(self._pieces),
            token_ids=tuple(self._made),
            finish_reason=self.finish_reason or "cancelled",
            timings=Timings(
                prompt_tokens=self._prompt_tokens,
                new_tokens=len(self._made),
                ttft_s=self._first - self._accepted,
                decode_s=self._last - self._first,
                total_s=now - self._accepted,
                queue_s=self._started - self._accepted,
                cached_tokens=num_cached,
                decode_bytes=self.decode_bytes,
                forced_tokens=self.num_forced,
                drafts=self.drafts,
                longest_gap_s=self._longest_gap_s,
            ),
            seed=self._sampler.params.seed,
            stop=self._stop,
        )
        return (Chunk(rest, ()) if rest else None), completion
