"""What a request may ask of sampling: checked once, frozen, and free of torch and numpy."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from soloist.errors import BadSampling, BadTokenId

# What log probabilities are for: the answer, the prompt and the answer, or the prompt alone. Then
# there is no answer.
Scores = Literal["answer", "both", "prompt"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        temperature: 0 takes the best token; otherwise scores are divided by it (0.01 … 100).
        top_k: how many of the best tokens stay; None keeps all.
        top_p: the smallest set of best tokens with this share of probability stays; 1 keeps all.
        min_p: tokens with less than this share of the best token's probability go; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt
            or output (0 < … <= 100); 1 is off.
        presence_penalty: taken once from tokens in the output (-2 … 2).
        frequency_penalty: taken from tokens for each time they are in the output (-2 … 2).
        logit_bias: added to the logits of these token ids (-100 … 100).
        stop_token_ids: tokens that end generation beside the model's own.
        seed: 0 … 2^64 - 1; None draws one per request.
        max_tokens: generation ends after this many tokens.
        min_tokens: no token that ends generation is chosen before this many others.
        ignore_eos: the model's end-of-sequence tokens are tokens like any other.
        stop: strings that end generation.

    Raises:
        BadSampling: a value of the wrong type or out of range, or values that contradict another.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    max_tokens: int = 512
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_collections()
        self._check_contradictions()
        # The caller's dictionary may change later; this copy cannot.
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def __reduce__(self) -> tuple[Any, ...]:
        """As plain values, for another process."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return _unpickled, (values | {"logit_bias": dict(self.logit_bias)},)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on which tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def has_filters(self) -> bool:
        """Whether some tokens are left out for their scores."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def with_seed(self) -> "SamplingParams":
        """The same with a seed, drawn from the system if none was given; greedy needs none."""
        if self.is_greedy or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(64))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a vocabulary of `vocab_size` does not have.

        Raises:
            BadTokenId: in `logit_bias` or `stop_token_ids`.
        """
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in sorted(getattr(self, name)):
                if token_id >= vocab_size:
                    raise BadTokenId(name, token_id, vocab_size)

    def describe(self) -> dict[str, object]:
        """Temperature, max_tokens and whatever differs from its default, as plain values."""
        always = {"temperature", "max_tokens"}
        return {
            item.name: _plain(getattr(self, item.name))
            for item in fields(self)
            if item.name in always or getattr(self, item.name) not in (item.default, {})
        }

    def _check_numbers(self) -> None:
        if not _is_number(self.temperature) or not (
            self.temperature == 0 or 0.01 <= self.temperature <= 100
        ):
            raise BadSampling("temperature", self.temperature, "0 (greedy) or 0.01 … 100")
        _check_real("top_p", self.top_p, 0, 1, is_low_allowed=False)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("repetition_penalty", self.repetition_penalty, 0, 100, is_low_allowed=False)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        _check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.top_k is not None:
            _check_whole("top_k", self.top_k, 1, "leave top_k out to keep all tokens")
        if self.seed is not None and (not _is_whole(self.seed) or not 0 <= self.seed < 2**64):
            raise BadSampling("seed", self.seed, "a whole number, 0 … 2^64 - 1, or None")
        _check_whole("max_tokens", self.max_tokens, 1)
        _check_whole("min_tokens", self.min_tokens, 0)
        if not isinstance(self.ignore_eos, bool):
            raise BadSampling("ignore_eos", self.ignore_eos, "True or False")

    def _check_collections(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise BadSampling("logit_bias", self.logit_bias, "a mapping of token id to bias")
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id, 0, "its keys are token ids")
            _check_real(f"logit_bias[{token_id}]", bias, -100, 100)
        if not isinstance(self.stop_token_ids, frozenset):
            raise BadSampling("stop_token_ids", self.stop_token_ids, "a frozenset of token ids")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id, 0, "give token ids")
        if not isinstance(self.stop, tuple):
            raise BadSampling("stop", self.stop, "a tuple of strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise BadSampling("stop", text, "strings of at least one character")

    def _check_contradictions(self) -> None:
        if self.is_greedy:
            unused = {"top_k": None, "top_p": 1, "min_p": 0, "seed": None}
            for name, off in unused.items():
                value = getattr(self, name)
                if value != off:
                    raise BadSampling(
                        name,
                        value,
                        "only with a temperature above 0; at 0 the likeliest token is chosen",
                        f"leave {name} out, or set a temperature above 0",
                    )
        if self.min_tokens > self.max_tokens:
            raise BadSampling(
                "min_tokens", self.min_tokens, f"at most max_tokens, here {self.max_tokens}"
            )


def _unpickled(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _check_real(
    name: str, value: object, low: float, high: float, *, is_low_allowed: bool = True
) -> None:
    within = _is_number(value) and low <= value <= high  # type: ignore[operator]
    if not within or (value == low and not is_low_allowed):
        allowed = f"{low} … {high}" if is_low_allowed else f"above {low}, at most {high}"
        raise BadSampling(name, value, allowed)


def _check_whole(name: str, value: object, low: int, hint: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise BadSampling(name, value, f"a whole number of at least {low}", hint)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
