"""The definition of sampling: which token follows from logits, parameters, counts and a position.

Everything that decides is integer or exactly rounded fp32 arithmetic on the host, so equal logits
give equal tokens on every machine, whatever device they come from (docs/sampling.md).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from soloist.errors import BadLogits, BadTokenId, GrammarFailed
from soloist.sampling.adjust import TokenCounts, adjusted
from soloist.sampling.constraint import Constraint, Words, has_bit, set_bit, words_of
from soloist.sampling.elementary import FloatArray
from soloist.sampling.filters import survivors
from soloist.sampling.noise import Noise, noise_of, noisy_argmax
from soloist.sampling.params import SamplingParams
from soloist.sampling.stop import StopTest


def sample(
    logits: FloatArray,
    params: SamplingParams,
    counts: TokenCounts,
    position: int,
    ending_ids: Iterable[int] = (),
    allowed: Words | None = None,
    noise: Noise | None = None,
) -> int:
    """The token id at `position`; a pure function.

    Sampling takes the largest score + Gumbel noise among the tokens that pass the filters, which
    draws from their softmax (Maddison et al., "A* sampling", 2014). Equal sums: the lowest id.

    Args:
        logits: [V] fp32.
        params: with a seed, unless greedy.
        counts: prompt and output so far.
        position: index in prompt and output of the token to be chosen.
        ending_ids: tokens that end generation, banned during the first min_tokens.
        allowed: bits [ceil(V / 32)] of the tokens that may be chosen; None for all.
        noise: [V] of the seed and the position, if it was made before.

    Raises:
        BadLogits: the best score is NaN or infinite.
    """
    scores = adjusted(logits, params, counts, ending_ids, allowed)
    if not params.is_greedy and params.temperature != 1:
        with np.errstate(over="ignore"):  # an overflow is refused below
            scores = scores / np.float32(params.temperature)
    best = int(scores.argmax())
    if not math.isfinite(scores[best]):
        raise BadLogits(position, float(scores[best]))
    if params.is_greedy:
        return best
    if params.seed is None:
        raise ValueError("sampling needs a seed: use params.with_seed()")
    if not params.has_filters:
        noise = noise or noise_of(params.seed, position, np.arange(len(scores)))
        return noisy_argmax(scores, noise)
    ids = survivors(scores, params)
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[noisy_argmax(scores[ids], noise_of(params.seed, position, ids))])


class Largest:
    """The token id of the largest of logits [V], the lowest of equal ones, found on their device.

    The device is asked at once, and `wait` waits for it. A first token waits for all of this: one
    kernel and two copies into pinned memory.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        score, token_id = logits.max(0)  # of equal ones the first
        self._score = score.to("cpu", non_blocking=True)
        self._token_id = token_id.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if logits.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(logits.device))

    def wait(self, position: int) -> int:
        """The token id, at `position`.

        Raises:
            BadLogits: its logit is NaN or infinite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not math.isfinite(score := float(self._score)):
            raise BadLogits(position, score)
        return int(self._token_id)


class Sampler:
    """Chooses the tokens of one request.

    `pick` changes nothing; `observe` appends what was taken, `rollback` takes the last tokens back,
    so a speculated continuation can be tried and undone.

    Attributes:
        params: with a seed, unless greedy.
        stop_test: when generation ends.
        output_ids: what was observed.
        counts: of prompt and output.
        is_constrained: whether the output must have a certain form.

    Args:
        params: a missing seed is drawn here; `params` of the sampler holds it.
        vocab_size: V.
        prompt_ids: the prompt.
        eos_ids: the model's end-of-sequence tokens.
        constraint: the form that the output must have, at its beginning; taken over.

    Raises:
        BadTokenId: a token id in params, prompt or eos_ids outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params.with_seed()
        self.stop_test = StopTest.for_request(params, eos_ids)
        for token_id in self.stop_test.ending_ids:
            if not 0 <= token_id < vocab_size:
                raise BadTokenId("eos_ids", token_id, vocab_size)
        self.output_ids: list[int] = []
        self.counts = TokenCounts(vocab_size, prompt_ids)
        self.is_constrained = constraint is not None
        self._vocab_size = vocab_size
        self._constraint = constraint
        self._span: deque[int] | None = None  # what must come next; None until asked for
        # At a position, made before its logits are there.
        self._noise: tuple[int, Noise] | None = None
        self._largest: tuple[int, Largest] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the output has its form and nothing may follow, not even a token that ends it."""
        return self._constraint is not None and self._constraint.is_complete

    @property
    def forced_ids(self) -> Sequence[int]:
        """Tokens that must come next whatever the logits are, as far as that is known."""
        if self._constraint is None:
            return ()
        if self._span is None:
            self._span, ending_ids = deque(), self.stop_test.ending_ids
            for token_id in self._constraint.forced():
                if token_id in ending_ids or token_id >= self._vocab_size:
                    break
                self._span.append(token_id)
        return self._span

    def allowed(self) -> Words | None:
        """Bits [ceil(V / 32)] of the tokens that may come next; None where all may.

        Tokens that end generation are allowed where the output has its form, and nowhere else.

        Raises:
            GrammarFailed: there is none.
        """
        constraint = self._constraint
        if constraint is None:
            return None
        if self.forced_ids:
            return words_of([self.forced_ids[0]], self._vocab_size)
        words = constraint.allowed()
        for token_id in self.stop_test.ending_ids:
            set_bit(words, token_id, value=constraint.may_end)
        if not words.any():
            raise GrammarFailed(len(self.output_ids), "no token of the vocabulary may come next")
        return words

    @property
    def takes_the_largest(self) -> bool:
        """Whether the next token is the one with the largest logit, whatever came before."""
        is_banned = len(self.output_ids) < self.params.min_tokens and self.stop_test.ending_ids
        is_changed = self.params.has_penalties or self.params.logit_bias or is_banned
        return self.params.is_greedy and not is_changed and not self.is_constrained

    def prepare(self, position: int, logits: torch.Tensor) -> None:
        """Do now what `pick` needs for `position`, and what does not wait for logits.

        Noise of a large vocabulary takes as long as a short prompt. Filters that leave few tokens
        need little of it.

        Args:
            position: of the token to be chosen.
            logits: [V] that `pick` will be given; a GPU may still compute them.
        """
        seed = self.params.seed
        if logits.is_cuda and self.takes_the_largest:
            self._largest = position, Largest(logits)
        elif seed is not None and not self.params.is_greedy and not self.params.has_filters:
            self._noise = position, noise_of(seed, position, np.arange(self._vocab_size))

    def pick(self, logits: torch.Tensor, position: int) -> int:
        """The token id at `position` for logits [V] of any device and floating type.

        Raises:
            BadLogits: the best score is NaN or infinite.
            GrammarFailed: no token is allowed.
        """
        if logits.shape != (self._vocab_size,):
            raise ValueError(f"logits have shape {list(logits.shape)}, not [{self._vocab_size}]")
        asked, self._largest = self._largest, None
        if logits.is_cuda and self.takes_the_largest:
            if asked is None or asked[0] != position:
                asked = position, Largest(logits)
            return asked[1].wait(position)
        host = logits.detach().to("cpu", torch.float32).numpy()
        ending_ids, allowed = self.stop_test.ending_ids, self.allowed()
        prepared, self._noise = self._noise, None
        noise = prepared[1] if prepared is not None and prepared[0] == position else None
        return sample(host, self.params, self.counts, position, ending_ids, allowed, noise)

    def observe(self, token_id: int) -> None:
        """Append `token_id` to the output.

        Raises:
            GrammarFailed: it is not allowed here.
        """
        if self._constraint is not None and token_id not in self.stop_test.ending_ids:
            self._constraint.take(token_id)
        if self._span and self._span[0] == token_id:
            self._span.popleft()
        if not self._span:
            self._span = None
        self.counts.add(token_id)
        self.output_ids.append(token_id)

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow one after the other, none of them the end.

        Tokens outside the vocabulary cannot. The output stays as it is. Behind the last one there
        may be a dead end.

        Raises:
            GrammarFailed: nothing can follow.
        """
        count = 0
        try:
            for token_id in token_ids:
                if token_id in self.stop_test.ending_ids or not 0 <= token_id < self._vocab_size:
                    break
                if self._constraint is not None:
                    if self.is_complete or not has_bit(self._constraint.allowed(), token_id):
                        break
                    self._constraint.take(token_id)
                count += 1
        except GrammarFailed:
            if not count:
                raise
        finally:
            if self._constraint is not None:
                self._constraint.rollback(count)
        return count

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` of the output back."""
        if not 0 <= num_tokens <= len(self.output_ids):
            raise ValueError(f"cannot take back {num_tokens} of {len(self.output_ids)} tokens")
        for _ in range(num_tokens):
            token_id = self.output_ids.pop()
            self.counts.remove(token_id)
            if self._constraint is not None and token_id not in self.stop_test.ending_ids:
                self._constraint.rollback(1)
        self._span = None
