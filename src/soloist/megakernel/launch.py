"""What a launch of the decode kernel is given, packed for it. No torch, no device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from soloist.megakernel.abi import LAUNCH
from soloist.megakernel.choice import Choice, PackedChoices, pack_choices
from soloist.megakernel.drafting import DraftingLaunch
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.sampling_header import packed_steps

# Input tokens begin in a cache line of their own.
LAUNCH_WORDS = -(-LAUNCH.num_bytes // 64) * 16


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a launch: a sequence that goes on, or positions of it side by side.

    Attributes:
        sequence: row of the page tables.
        position: of the first round's token.
        tokens: input tokens of the first rounds, at least one; later rounds take what was chosen.
        stops: token ids that end the launch when this query chooses one.
        stride: positions from round to round.
        keep: rounds in which a stop token does not count yet.
        choice: how tokens are chosen; None takes the largest logit. Penalties count the tokens that
            this very query takes, so they need a stride of 1.
    """

    sequence: int
    position: int
    tokens: Sequence[int]
    stops: Sequence[int] = ()
    stride: int = 1
    keep: int = 0
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """What a launch is given, ready to be copied: the same for all ranks.

    Attributes:
        words: a `LAUNCH`, from `LAUNCH_WORDS` on input tokens [query][round].
        num_queries: 1 … 8.
        most_rounds: 1 … max_rounds.
        num_given: by query, rounds whose input tokens are given.
        choices: None where every query takes its largest logit.
    """

    words: NDArray[np.int32]
    num_queries: int
    most_rounds: int
    num_given: list[int]
    choices: PackedChoices | None


def pack(queries: Sequence[Query], rounds: int, vocab_size: int) -> Given:
    """What a launch is given; `queries` and `rounds` as of `Decoder.start`."""
    assert 1 <= len(queries) <= MAX_QUERIES, f"{len(queries)} queries"
    launch = np.zeros((), LAUNCH.dtype)
    launch["queries"], launch["rounds"] = len(queries), rounds
    packed = _packed_choices(queries, vocab_size)
    if packed is not None:
        launch["sampling"], launch["step"] = packed.params, packed.steps
    # Field by field: numpy takes longer for each value of a record than for eight in one array.
    starts = launch["query"][: len(queries)]
    num_given = [min(len(c.tokens), rounds) for c in queries]
    starts["sequence"] = [c.sequence for c in queries]
    starts["position"] = [c.position for c in queries]
    starts["stride"] = [c.stride for c in queries]
    starts["forced"] = num_given
    starts["num_stops"] = [len(c.stops) for c in queries]
    starts["keep"] = [c.keep for c in queries]
    forced = np.zeros((len(queries), rounds), np.int32)
    for i, (c, count) in enumerate(zip(queries, num_given, strict=True)):
        forced[i, :count] = c.tokens[:count]
        if c.stops:
            starts["stops"][i, : len(c.stops)] = c.stops
    words = np.zeros(LAUNCH_WORDS + forced.size, np.int32)
    words[: LAUNCH.num_bytes // 4] = np.frombuffer(launch.tobytes(), np.int32)
    words[LAUNCH_WORDS:] = forced.ravel()
    return Given(words, len(queries), rounds, num_given, packed)


def pack_drafting(queries: Sequence[Query], launch: DraftingLaunch, vocab_size: int) -> Given:
    """What a launch that drafts is given.

    All columns are there, since later rounds have as many as they draft tokens; the first round has
    those of its drafts.

    Args:
        queries: the latest token of each sequence, at its position.
        launch: their first drafts, and the rounds that there may be at most.
        vocab_size: V.
    """
    assert all(len(query.tokens) == 1 for query in queries), "the latest token"
    for query in queries:
        assert query.choice is None or query.choice.allowed is None, "the host says what one takes"
    rounds, (*firsts, count) = launch.most_rounds, launch.columns
    assert count <= MAX_QUERIES, f"{count} queries"
    by_sequence = pack([replace(query, stride=0) for query in queries], rounds, vocab_size)
    words = np.zeros(LAUNCH_WORDS + MAX_QUERIES * rounds, np.int32)
    words[:LAUNCH_WORDS] = by_sequence.words[:LAUNCH_WORDS]
    words[LAUNCH_WORDS::rounds][:count] = [
        token_id
        for query, one in zip(queries, launch.sequences, strict=True)
        for token_id in (*query.tokens, *one.draft_ids)
    ]
    # Columns of a sequence differ in their place alone; what the first round lacks is as the first.
    owners, places = np.zeros((2, MAX_QUERIES), np.int64)
    for number, (first, end) in enumerate(pairwise((*firsts, count))):
        owners[first:end], places[first:end] = number, range(end - first)
    (record,) = words[: LAUNCH.num_bytes // 4].view(LAUNCH.dtype)
    record["queries"] = count
    record["query"] = record["query"][owners]
    record["query"]["position"] += places
    record["query"]["position"][count:] = 0
    if by_sequence.choices is not None:
        made = by_sequence.choices.steps["num_output"].astype(np.int64)
        record["sampling"] = record["sampling"][owners]
        positions = np.array([query.position + 1 for query in queries])[owners] + places
        record["step"] = packed_steps(positions, made[owners] + places)
    return replace(by_sequence, words=words, num_queries=count, num_given=[1] * MAX_QUERIES)


def _packed_choices(queries: Sequence[Query], vocab_size: int) -> PackedChoices | None:
    if all(c.choice is None for c in queries):
        return None
    for c in queries:
        counts = c.choice is not None and c.choice.params.has_penalties
        assert not counts or c.stride < 2, "penalties count every token before"
    return pack_choices([c.choice for c in queries], [c.position for c in queries], vocab_size)
