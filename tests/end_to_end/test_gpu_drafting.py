"""Launches that draft give the tokens of launches that do not, on a GPU."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from end_to_end.test_experts import write_mixture
from end_to_end.test_gpu_lanes import rounded
from interpreter.lane_models import fields_of, random_weights
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import Capacity, KernelModel, load_kernel
from soloist.engine.support import find_support
from soloist.megakernel.choice import Choice
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch, DraftingSequence
from soloist.megakernel.launch import Query
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts
from soloist.settings import read_settings
from soloist.speculation import NO_DRAFTS, Archive, Costs, Draft, Drafter, Drafting, deal
from soloist.weights.sharding import shard_all
from unit.model.configurations import written

pytestmark = pytest.mark.gpu

ALWAYS = Drafting(Costs((1,) * 7), looks_up=True)
PREDICTED = Drafting(Costs((1010,) * 7), looks_up=False)
PROMPT = "def fibonacci(n):\n"
TOKENS = 200


# What drafting depends on: how matrices, keys and values are stored, experts, lanes, and ranks,
# which share GPU 0 here.
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "fp8": {"weights": "fp8"},
    "kv-int8": {"kv": "int8", "precision": "bf16"},
    "kv-int4": {"kv": "int4", "precision": "bf16"},
    "experts": {"precision": "bf16"},
    "experts-int4": {"precision": "bf16", "weights": "int4"},
    "int4": {"weights": "int4"},
    "int8": {"weights": "int8"},
    "2-ranks": {"rank_devices": (0, 0)},
    "2-ranks-int4": {"rank_devices": (0, 0), "weights": "int4"},
    "8-ranks": {"rank_devices": (0,) * 8},
    "lanes": {},
}


# How tokens are chosen.
WAYS = ("greedy", "sampled", "penalties")


def laneformer() -> KernelModel:
    """Random weights, with the vocabulary of étude."""
    fields = {**fields_of("mean of lanes"), "vocab_size": 8192, "max_position_embeddings": 4096}
    with TemporaryDirectory() as folder:
        config = read_config(written(Path(folder), fields))
    device = torch.device("cuda:0")
    plan = find_support(config, Dtype.BF16, device).plan
    assert plan is not None
    weights = shard_all(plan.part_of(0), rounded(random_weights(config)))
    capacity = Capacity(4096, sequences=len(WAYS))
    on_gpu = {name: values.to(device) for name, values in weights.items()}
    return load_kernel(plan, [on_gpu], [device], capacity, read_settings().cache, keep_rows=True)


@cache
def model(kind: str) -> KernelModel:
    if kind == "lanes":
        return laneformer()
    asked = EngineConfig(
        "etude", device="cuda:0", context_tokens=4096, sequences=len(WAYS), **KINDS[kind]
    )
    with TemporaryDirectory() as folder:
        if kind.startswith("experts"):
            sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
            mixture = write_mixture(Path(folder) / "mixture", **sizes, max_position_embeddings=4096)
            asked = replace(asked, model=str(mixture))
        loaded = Engine.load(asked).model
    assert isinstance(loaded, KernelModel)
    assert loaded.drafts_in_kernel
    return loaded


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of the model."""
    return request.param


@cache
def prompt() -> tuple[int, ...]:
    return tuple(Engine.load(EngineConfig("etude", device="cpu")).tokenizer.encode(PROMPT))


def choice(kind: str, how: str, output: list[int]) -> Choice | None:
    if how == "greedy":
        return None
    vocab = model(kind).plan.model.vocab_size
    counts = TokenCounts(vocab, list(prompt()))
    for token_id in output:
        counts.add(token_id)
    params = SamplingParams(temperature=1.0, seed=7, top_p=0.9)
    if how == "penalties":
        params = replace(params, repetition_penalty=1.2, frequency_penalty=0.4)
    return Choice(params, counts)


@cache
def plain(kind: str, how: str) -> tuple[int, ...]:
    """The prompt is fed, then the answer is decoded, a token a round."""
    decoder, ids = model(kind).decoder, list(prompt())
    first = read(kind, 0)
    query = Query(0, len(ids), [first], choice=choice(kind, how, [first]))
    made = [first, *(tokens[0] for tokens in decoder.run([query], TOKENS))]
    assert len(made) == TOKENS + 1
    return tuple(made)


def read(kind: str, row: int) -> int:
    """Feed the prompt to a sequence; the token behind it."""
    ids = list(prompt())
    return model(kind).decoder.run([Query(row, 0, ids)], len(ids))[-1][0]


@dataclass
class Answer:
    """A sequence of a launch that drafts, next to the definition."""

    how: str
    drafter: Drafter | None
    most: int = TOKENS
    draft: Draft | None = None
    rounds: list[tuple[DraftedRound, int]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token_id for made, _ in self.rounds for token_id in made.tokens]

    def offer(self, stops: Sequence[int]) -> None:
        left = self.most - len(self.tokens)
        self.draft = None
        if self.drafter is not None and left:
            self.draft = self.drafter.draft(self.output, min(7, left - 1))
        if self.draft is not None:
            assert not set(stops) & set(self.draft.ids), "stops are tested apart"

    def take(self, made: DraftedRound) -> None:
        self.rounds.append((made, len(self.draft.ids) if self.draft else 0))
        if self.draft is not None and self.drafter is not None:
            right = len(made.tokens) - 1
            self.drafter.judge(self.draft, min(right + 1, len(self.draft.ids)), right)
        self.output += made.tokens


def offer(answers: Sequence[Answer], stops: Sequence[int], most_beside: int) -> None:
    for one in answers:
        one.offer(stops)
    offered = [len(one.draft.ids) if one.draft else 0 for one in answers]
    for one, count in zip(answers, deal(offered, MAX_QUERIES, most_beside), strict=True):
        if one.draft is not None:
            one.draft = replace(one.draft, ids=one.draft.ids[:count]) if count else None


def launch(
    kind: str,
    answers: Sequence[Answer],
    stops: Sequence[int] = (),
    *,
    keeps_logits: bool = False,
    most_beside: int = MAX_QUERIES,
) -> None:
    """A launch over pages that have the prompt, a sequence for each answer."""
    decoder, ids = model(kind).decoder, list(prompt())
    for row, one in enumerate(answers):
        one.output = [read(kind, row)]
        assert one.output == [plain(kind, one.how)[0]]
    offer(answers, stops, most_beside)
    given = tuple(
        DraftingSequence(
            NO_DRAFTS if one.drafter is None else one.drafter.state,
            one.draft, ids, list(one.output), one.most, stops,
        )
        for one in answers
    )  # fmt: skip
    queries = [
        Query(row, len(ids), list(one.output), stops, choice=choice(kind, one.how, one.output))
        for row, one in enumerate(answers)
    ]
    most_rounds = KEPT_ROUNDS if keeps_logits else TOKENS
    asked = DraftingLaunch(given, most_rounds, most_beside)
    decoder.start_drafting(queries, asked, keeps_logits=keeps_logits)
    for made in decoder.drafted_rounds():
        for one, of_one in zip(answers, made, strict=True):
            one.take(of_one)
        offer(answers, stops, most_beside)


def drafted(
    kind: str, how: str, drafter: Drafter, stops: Sequence[int], most: int
) -> list[tuple[DraftedRound, int]]:
    """Rounds of a launch of one sequence, and how many tokens the definition drafts in each."""
    one = Answer(how, drafter, most)
    launch(kind, [one], stops)
    return one.rounds


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.5, 1.0, None])
def test_drafts_change_no_token(kind: str, how: str, wrong: float | None) -> None:
    answer, rng = list(plain(kind, how)), random.Random(3)
    predicted = None
    if wrong is not None:
        predicted = [rng.randrange(2000) if rng.random() < wrong else t for t in answer]
    drafter = Drafter(ALWAYS, prompt(), predicted, Archive())
    rounds = drafted(kind, how, drafter, [], TOKENS)
    assert [t for made, _ in rounds for t in made.tokens] == answer[1:]
    assert [made.num_drafted for made, _ in rounds] == [count for _, count in rounds]
    if wrong == 0.0:
        assert len(rounds) == TOKENS // 8


@pytest.mark.parametrize("how", WAYS)
def test_a_stop_ends_the_launch(kind: str, how: str) -> None:
    answer = list(plain(kind, how))
    stop = answer[50]
    until = answer.index(stop, 1)
    drafter = Drafter(PREDICTED, prompt(), [*answer[:until], 1, 1, 1], Archive())
    rounds = drafted(kind, how, drafter, [stop], TOKENS)
    assert [t for made, _ in rounds for t in made.tokens] == answer[1 : until + 1]


def test_an_earlier_answer_is_drafted_from(kind: str) -> None:
    answer, archive = list(plain(kind, "sampled")), Archive()
    archive.add(answer)
    rounds = drafted(kind, "sampled", Drafter(ALWAYS, prompt(), None, archive), [], TOKENS)
    assert [t for made, _ in rounds for t in made.tokens] == answer[1:]
    assert len(rounds) < TOKENS // 2


def test_the_same_launch_makes_the_same_rounds(kind: str) -> None:
    answer, seen = list(plain(kind, "sampled")), []
    for _ in range(5):
        predicted = [t if n % 9 else 5 for n, t in enumerate(answer)]
        drafter = Drafter(ALWAYS, prompt(), predicted, Archive())
        seen.append([made for made, _ in drafted(kind, "sampled", drafter, [], TOKENS)])
    assert all(one == seen[0] for one in seen)


def edited(answer: Sequence[int], wrong: float, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2000) if rng.random() < wrong else t for t in answer]


@pytest.mark.parametrize("wrong", [(0.0, 0.0, 0.0), (0.1, 0.3, 0.0), (1.0, None, 0.1)])
def test_sequences_side_by_side_change_no_token(kind: str, wrong: tuple[float | None, ...]) -> None:
    """Greedy, sampled and with penalties in one launch; who has no drafter drafts nothing."""
    answers = []
    for number, (how, share) in enumerate(zip(WAYS, wrong, strict=True)):
        drafter = None
        if share is not None:
            predicted = edited(plain(kind, how), share, number)
            drafter = Drafter(ALWAYS, prompt(), predicted, Archive())
        answers.append(Answer(how, drafter))
    launch(kind, answers)
    assert max(len(one.tokens) for one in answers) == TOKENS, "until one has all"
    for one in answers:
        assert one.tokens == list(plain(kind, one.how)[1 : len(one.tokens) + 1])
        assert [made.num_drafted for made, _ in one.rounds] == [count for _, count in one.rounds]
        if one.drafter is None:
            assert {count for _, count in one.rounds} == {0}
    assert len({len(one.rounds) for one in answers}) == 1


@pytest.mark.parametrize("most_beside", [3, 5])
def test_a_sequence_without_drafts_leaves_others_fewer_queries(kind: str, most_beside: int) -> None:
    answers = [
        Answer(how, None if number else Drafter(ALWAYS, prompt(), plain(kind, how), Archive()))
        for number, how in enumerate(WAYS)
    ]
    if most_beside == 3:
        # A launch of which nobody drafts in its first round is none.
        answers[1].drafter = Drafter(ALWAYS, prompt(), plain(kind, WAYS[1]), Archive())
        answers[2].drafter = Drafter(ALWAYS, prompt(), plain(kind, WAYS[2])[:20], Archive())
    launch(kind, answers, most_beside=most_beside)
    for one in answers:
        assert one.tokens == list(plain(kind, one.how)[1 : len(one.tokens) + 1])
        assert [made.num_drafted for made, _ in one.rounds] == [count for _, count in one.rounds]
    drafts = [sum(one.rounds[n][1] for one in answers) for n in range(len(answers[0].rounds))]
    limited = [
        count for n, count in enumerate(drafts) if any(not one.rounds[n][1] for one in answers)
    ]
    assert limited
    assert max(limited) == most_beside - 3


def test_two_greedy_sequences_change_no_token(kind: str) -> None:
    answer = plain(kind, "greedy")
    answers = [
        Answer("greedy", Drafter(ALWAYS, prompt(), edited(answer, share, 5), Archive()))
        for share in (0.0, 0.2)
    ]
    launch(kind, answers)
    for one in answers:
        assert one.tokens == list(answer[1 : len(one.tokens) + 1])


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_logits_of_accepted_tokens_are_those_of_plain_rounds(kind: str, how: str) -> None:
    decoder, ids = model(kind).decoder, list(prompt())
    answer, vocab = plain(kind, how), model(kind).plan.model.vocab_size
    one = Answer(how, Drafter(ALWAYS, prompt(), edited(answer, 0.2, 1), Archive()))
    launch(kind, [one], keeps_logits=True)
    assert len(one.rounds) == KEPT_ROUNDS
    found = [
        decoder.logits_of(number, column)[:vocab].cpu()
        for number, (made, _) in enumerate(one.rounds)
        for column in range(len(made.tokens))
    ]
    assert len(found) > KEPT_ROUNDS
    wanted, first = list[torch.Tensor](), read(kind, 0)
    for start in range(0, len(found), KEPT_ROUNDS):
        output = list(answer[: start + 1])
        query = Query(0, len(ids) + start, output[-1:], choice=choice(kind, how, output))
        decoder.start([query], KEPT_ROUNDS, keeps_logits=True)
        assert len(list(decoder.tokens())) == KEPT_ROUNDS
        wanted += [decoder.logits_of(n, 0)[:vocab].cpu() for n in range(KEPT_ROUNDS)]
    assert first == answer[0]
    assert torch.equal(torch.stack(found), torch.stack(wanted[: len(found)]))
