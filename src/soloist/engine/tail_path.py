"""Which way a prompt's tail is read: by a pass of prefill, or in rounds of the decode kernel.

The tail is what lies behind the last boundary of chunks. It is never kept for other prompts, so it
alone may have the bits of either way: they differ. What is kept must not change an answer, so the
choice follows from the prompt's length, the model and the kind of GPU, and from nothing that one
start or one request may have otherwise: neither from what was kept, nor from load, nor from a
clock. Pure.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from soloist.megakernel.limits import MAX_QUERIES
from soloist.prefill.widths import width_of

TailPath = Literal["prefill", "decode", "auto"]
TAIL_PATHS: tuple[TailPath, ...] = get_args(TailPath)

# Prompts of up to so many tokens are read by the decode kernel: three rounds of eight queries take
# less time than the launches of one pass of prefill.
DECODE_PATH_TOKENS = 24

# A cold prompt may take such a share longer for what a kept one gains.
MOST_LOSS = 0.02

# Where the figures below were measured; elsewhere nothing is known, and passes read all.
MEASURED_ARCH = "sm_90a"
# One H200, 16-bit weights. Rounds: bytes at what it reads, and what a layer of a round of eight
# queries waits, as in `planning/expectation.py`: rows of `benchmarks/results/h200.json` with eight
# columns of one sequence are met within 6 %. What a launch takes the host to prepare and to start:
# docs/experiments/prompts.md, 2026-11-21.
READ_BANDWIDTH = 4.44e12
ROUND_LAYER_S = 5.2e-6
LAUNCH_S = 0.3e-3
# Passes: the planner's formula for prompts, from the same files.
PASS_START_S, PASS_LAYER_S = 0.5e-3, 40e-6
PASS_READ_SHARE, PASS_FLOPS = 0.8, 0.76 * 989e12
# And attention to keys that were gathered, for each key, layer and number of a head: up to some
# hundred queries one tile after the other sets the pace. Rows of
# `benchmarks/results/h200-prefill.json` with kept tokens are met within 20 %, from below.
GATHERED_KEY_S = 0.26e-9


@dataclass(frozen=True, slots=True)
class TailFacts:
    """Of a model on one GPU.

    Attributes:
        weight_bytes: that a round streams.
        values: of the layers' matrices.
        kv_bytes: of a position, in all layers.
        layers: how many.
        head_dim: D.
        page_attention: passes attend to KV pages as they lie.
    """

    weight_bytes: int
    values: int
    kv_bytes: float
    layers: int
    head_dim: int
    page_attention: bool


@dataclass(frozen=True, slots=True)
class TailCosts:
    """What both ways take, in seconds.

    Attributes:
        round_s: a round of eight queries.
        round_key_s: more for each key in sight.
        pass_s: a pass, beside what follows.
        weights_s: reading weights for it, or
        row_s: its arithmetic for each row, whichever is more.
        pass_key_s: more for each key in sight.
    """

    round_s: float
    round_key_s: float
    pass_s: float
    weights_s: float
    row_s: float
    pass_key_s: float

    def of_rounds(self, tokens: int, stop: int) -> float:
        """Reading so many tokens up to position `stop` in one launch."""
        rounds = -(-tokens // MAX_QUERIES)
        return LAUNCH_S + rounds * (self.round_s + stop * self.round_key_s)

    def of_pass(self, rows: int, stop: int) -> float:
        """A pass of so many rows up to position `stop`."""
        return self.pass_s + max(self.weights_s, rows * self.row_s) + stop * self.pass_key_s


def tail_costs(facts: TailFacts) -> TailCosts:
    """From what was measured; passes are taken to be rather quicker than they are.

    Where these attend to pages, keys are taken to be read once, as quickly as weights are.
    `benchmarks/results/h200-tails.json` has both ways: the quicker one is that of these costs.
    """
    gathered = facts.layers * facts.head_dim * GATHERED_KEY_S
    return TailCosts(
        round_s=facts.weight_bytes / READ_BANDWIDTH + facts.layers * ROUND_LAYER_S,
        round_key_s=facts.kv_bytes / READ_BANDWIDTH,
        pass_s=PASS_START_S + facts.layers * PASS_LAYER_S,
        weights_s=facts.weight_bytes / (READ_BANDWIDTH * PASS_READ_SHARE),
        row_s=2 * facts.values / PASS_FLOPS,
        pass_key_s=facts.kv_bytes / (READ_BANDWIDTH * PASS_READ_SHARE)
        if facts.page_attention
        else gathered,
    )


@dataclass(frozen=True, slots=True)
class TailRule:
    """The choice.

    Attributes:
        path: 'prefill' and 'decode' always take this way, to be measured.
        costs: by which 'auto' chooses; None where nothing was measured, and passes read all.
        widths: batch-invariant ones of passes, ascending; none where each chunk is a pass.
    """

    path: TailPath = "prefill"
    costs: TailCosts | None = None
    widths: tuple[int, ...] = ()

    def rounds_from(self, num_tokens: int, boundary: int) -> int:
        """Position from which on rounds read a prompt; its length where passes read all of it.

        Args:
            num_tokens: of the prompt.
            boundary: of chunks, the last one before the prompt's last token.
        """
        if num_tokens <= DECODE_PATH_TOKENS:
            return 0
        return boundary if boundary and self._takes_rounds(num_tokens, boundary) else num_tokens

    def _takes_rounds(self, num_tokens: int, boundary: int) -> bool:
        if self.path != "auto":
            return self.path == "decode"
        if self.costs is None:
            return False
        tail = num_tokens - boundary
        rows = width_of(tail, self.widths) if self.widths else tail
        rounds_s = self.costs.of_rounds(tail, num_tokens)
        if rounds_s >= self.costs.of_pass(rows, num_tokens):
            return False
        if not self.widths:
            return True  # the tail has a pass of its own, also where nothing is kept
        # Where nothing is kept the tail would be part of a wider pass, and lengthen it or not.
        lost_s = rounds_s - (self.cold_s(num_tokens) - self.cold_s(boundary))
        return lost_s <= MOST_LOSS * self.cold_s(num_tokens)

    def cold_s(self, num_tokens: int) -> float:
        """Passes over a prompt that is read whole and alone, without attention, which all have."""
        assert self.costs is not None, "known"
        whole, rest = divmod(num_tokens, self.widths[-1])
        seconds = whole * self.costs.of_pass(self.widths[-1], 0)
        return seconds + (self.costs.of_pass(width_of(rest, self.widths), 0) if rest else 0.0)
