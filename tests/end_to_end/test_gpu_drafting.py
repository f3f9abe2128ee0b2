"""Launches that draft give the tokens of launches that do not, on a GPU."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from end_to_end.test_experts import write_mixture
from soloist.engine import Engine, EngineConfig
from soloist.engine.kernel import KernelModel
from soloist.megakernel.choice import Choice
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch
from soloist.megakernel.launch import Query
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts
from soloist.speculation import Archive, Costs, Drafter, Drafting

pytestmark = pytest.mark.gpu

ALWAYS = Drafting(Costs((1,) * 7), looks_up=True)
PREDICTED = Drafting(Costs((1010,) * 7), looks_up=False)
PROMPT = "def fibonacci(n):\n"
TOKENS = 200


# What drafting depends on: how matrices, keys and values are stored, experts, and ranks, which
# share GPU 0 here.
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
}


# How tokens are chosen.
WAYS = ("greedy", "sampled", "penalties")


@cache
def model(kind: str) -> KernelModel:
    asked = EngineConfig("etude", device="cuda:0", context_tokens=4096, **KINDS[kind])
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
    first = decoder.run([Query(0, 0, ids)], len(ids))[-1][0]
    query = Query(0, len(ids), [first], choice=choice(kind, how, [first]))
    made = [first, *(tokens[0] for tokens in decoder.run([query], TOKENS))]
    assert len(made) == TOKENS + 1
    return tuple(made)


def drafted(
    kind: str, how: str, drafter: Drafter, stops: list[int], most: int
) -> list[tuple[DraftedRound, int]]:
    """Rounds of a launch over the same pages, and how many tokens the definition drafts in each."""
    decoder, ids, output = model(kind).decoder, list(prompt()), [plain(kind, how)[0]]
    left = most
    draft = drafter.draft(output, min(7, left - 1))
    launch = DraftingLaunch(drafter.state, draft, ids, output, most, stops)
    query = Query(0, len(ids), output, stops, choice=choice(kind, how, output))
    decoder.start_drafting(query, launch)
    rounds, answer = [], [*output]
    for made in decoder.drafted_rounds():
        rounds.append((made, len(draft.ids) if draft else 0))
        if draft is not None:
            fed, right = draft.ids, len(made.tokens) - 1
            drafter.judge(draft, min(right + 1, len(fed)), right)
        answer += made.tokens
        left -= len(made.tokens)
        draft = drafter.draft(answer, min(7, left - 1)) if left else None
        if draft is not None:
            ends = [n for n, token in enumerate(draft.ids) if token in stops]
            assert not ends, "stops are tested apart"
    return rounds


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
