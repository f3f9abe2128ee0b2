"""What drafting tokens ahead makes of decode speed. Pure.

A round drafts k tokens and checks them in one step of k + 1 query tokens. The drafts before the
first wrong one stand, and the step itself makes one more:

    tokens of a round = 1 + a + a² + … + a^k       (a: share of drafts accepted, each for itself)

    time of a round = k × time of a draft's token + time of a step of k + 1 query tokens

Drafts looked up in the text so far cost nothing; a draft model makes them one after the other.
"""

from dataclasses import dataclass

from soloist.errors import SettingError
from soloist.megakernel.limits import MAX_QUERIES
from soloist.planning.bounds import step_cost
from soloist.planning.expectation import Expectation, expect
from soloist.planning.hardware import Hardware
from soloist.planning.model import Model
from soloist.planning.precision import SIXTEEN_BIT, Precision

# What is assumed where nobody says how many drafts are accepted: (drafts a round, share).
LOOKED_UP = (7, 0.3)
DRAFTED = (4, 0.7)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted.

    Attributes:
        drafts: k, a round.
        acceptance: a, from 0 to 1.
        draft: the model that drafts, in 16 bits; None: drafts are looked up in the text.
        is_assumed: nobody said how many are accepted.
    """

    drafts: int
    acceptance: float
    draft: Model | None = None
    is_assumed: bool = False

    @property
    def tokens_per_round(self) -> float:
        """Accepted drafts and one more."""
        return sum(self.acceptance**i for i in range(self.drafts + 1))


def read_speculation(
    draft: Model | None, drafts: int | None, acceptance: float | None
) -> Speculation:
    """What options say, and assumptions for what they do not.

    Raises:
        SettingError: more drafts than a step has room for, or a share that is none.
    """
    usual = LOOKED_UP if draft is None else DRAFTED
    count = usual[0] if drafts is None else drafts
    if not 1 <= count < MAX_QUERIES:
        raise SettingError("--drafts", count, f"1 … {MAX_QUERIES - 1}")
    share = usual[1] if acceptance is None else acceptance
    if not 0 <= share <= 1:
        raise SettingError("--acceptance", share, "a share from 0 to 1, such as 0.6")
    return Speculation(count, share, draft, acceptance is None)


@dataclass(frozen=True, slots=True)
class Round:
    """Where the time of a round goes.

    Attributes:
        tokens: that stand, on average.
        draft_s: drafting all of them.
        check: the step that checks them.
    """

    tokens: float
    draft_s: float
    check: Expectation

    @property
    def tokens_per_s(self) -> float:
        """Expected decode speed."""
        return self.tokens / (self.draft_s + self.check.token_s)


def expect_round(
    model: Model,
    precision: Precision,
    context_tokens: int,
    speculation: Speculation,
    hardware: Hardware,
    gpus: int,
) -> Round:
    """A round of the model in this precision, on `gpus` GPUs that share draft and model alike."""
    queries = speculation.drafts + 1
    cost = step_cost(model, precision, context_tokens, queries=queries)
    draft_s = 0.0
    if speculation.draft is not None:
        own = step_cost(speculation.draft, SIXTEEN_BIT, context_tokens)
        draft_s = speculation.drafts * expect(own, hardware, gpus).token_s
    check = expect(cost, hardware, gpus, queries)
    return Round(speculation.tokens_per_round, draft_s, check)
