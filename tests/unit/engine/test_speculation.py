"""Drafts change no token: with and without them, whatever is drafted and whatever is asked for."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch

from plan.shapes import PUBLIC
from soloist.bench.decode import with_wrong
from soloist.engine import Completion, Failure
from soloist.engine.core import EngineCore
from soloist.engine.drafting import PREDICTIONS, drafting_of
from soloist.engine.events import Chunk
from soloist.engine.executor import Executor, Verified
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.reference import COLUMN_COSTS, ReferenceModel
from soloist.engine.request import Request
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.limits import MAX_QUERIES
from soloist.megakernel.plan import make_plan
from soloist.model.config import Attention, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.families import read_config
from soloist.model.folder import shipped_folder
from soloist.reference.build import build_reference
from soloist.reference.columns import columns_pay, rows_keep_bits
from soloist.sampling import Sampler, SamplingParams
from soloist.speculation import Archive, Costs, Drafter, Drafting
from soloist.speculation.drafter import WAIT_ROUNDS
from soloist.text.stream import TextStream
from soloist.text.tokenizer import Tokenizer
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakePrefill
from unit.prefill.models import MODELS, model, random_weights
from unit.sampling.constraints import Drawn, Steps

EOS = (3,)
CONFIG = model(*[Attention(4, 2, 16), replace(Attention(4, 2, 16), window=20)], context_tokens=600)
# Drafts as often as they can be had, however seldom they are right; and as the engine does.
ALWAYS = Drafting(Costs((1,) * 7), looks_up=True)
USUAL = Drafting(COLUMN_COSTS, looks_up=True)


def reference() -> ReferenceModel:
    torch.set_num_threads(1)
    return ReferenceModel(CONFIG, random_weights(CONFIG), 3 * 600, 3, 32, keeps_prefixes=True)


def kernel(sequences: int = 3) -> KernelExecutor:
    cache = Cache()
    decoder = FakeDecoder(cache, 4096, sequences)
    # Three requests that grow do not fit: some are preempted.
    return KernelExecutor(decoder, FakePrefill(cache), 14, VOCAB, keeps_prefixes=True)


def drafting_kernel(
    sequences: int = 3, most_beside: Sequence[int] = (MAX_QUERIES,) * MAX_QUERIES
) -> KernelExecutor:
    executor = kernel(sequences)
    executor.drafts_in_kernel, executor.most_beside = True, most_beside
    return executor


class Asked:
    """A random request, which may be made more than once."""

    def __init__(self, seed: int, most: int) -> None:
        rng = random.Random(seed)
        words = [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 6))] for _ in range(6)]
        self.prompt = [3, *chain.from_iterable(rng.choices(words, k=rng.randint(1, 12)))]
        sampled = rng.random() < 0.7
        self.params = SamplingParams(
            max_tokens=rng.randint(1, most),
            min_tokens=0,
            temperature=rng.choice((0.05, 0.3, 1.0)) if sampled else 0.0,
            seed=rng.randrange(2**64) if sampled else None,
            top_k=rng.choice((None, 3, 20)) if sampled else None,
            top_p=rng.choice((1.0, 0.9)) if sampled else 1.0,
            min_p=rng.choice((0.0, 0.05)) if sampled else 0.0,
            repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.7)),
            presence_penalty=rng.choice((0.0, 0.0, 0.7)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.5, -0.6)),
            logit_bias=rng.choice(({}, {5: 6.0, 9: 6.0}, {3: 2.0})),
            stop_token_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 2)))),
            ignore_eos=rng.random() < 0.5,
        )
        if rng.random() < 0.2:
            self.params = replace(self.params, min_tokens=self.params.max_tokens // 2)
        self.form = rng.choice((None, None, None, "steps", "drawn"))
        self.top_logprobs = rng.choice((None, None, None, 0, 3))
        self.scores = rng.choice(("answer",) * 8 + ("both",))
        self.seed = seed

    def sampler(self) -> Sampler:
        rng = random.Random(self.seed)
        constraint = None
        if self.form == "steps":
            sets: list[set[int]] = []
            while len(sets) < 60:
                sets += [{rng.randrange(4, VOCAB)} for _ in range(rng.choice((0, 0, 2, 7)))]
                sets += [{rng.randrange(4, VOCAB) for _ in range(3)}]
            constraint = Steps(VOCAB, sets)
        elif self.form == "drawn":
            constraint = Drawn(VOCAB, self.seed, share=0.1)
        return Sampler(self.params, VOCAB, self.prompt, EOS, constraint)


def answers(
    executor: Executor, asked: Sequence[Asked], drafters: Sequence[Drafter | None]
) -> tuple[list[tuple[object, ...]], list[Completion | None]]:
    """What clients see of requests side by side, in order; and how each ended."""
    core = EngineCore(executor, most_waiting=len(asked))
    requests = [
        Request(one.prompt, one.sampler(), top_logprobs=one.top_logprobs, scores=one.scores,
                drafter=drafter)
        for one, drafter in zip(asked, drafters, strict=True)
    ]  # fmt: skip
    for request in requests:
        core.submit(request)
    seen: dict[Request, list[object]] = {r: [] for r in requests}
    ends: dict[Request, Completion] = {}
    while core.requests:
        step = core.next()
        if step is None:
            continue
        for _ in core.do(step):
            pass
        for request in requests:
            for event in request.take():
                if isinstance(event, Completion):
                    ends[request] = event
                    seen[request].append((event.token_ids, event.finish_reason, event.stop))
                elif isinstance(event, Chunk):
                    seen[request].append((event.token_ids, event.logprobs, event.num_forced))
                elif isinstance(event, Failure):
                    seen[request].append(event.error.message)
                else:
                    seen[request].append(event)
    executor.check()
    return [tuple(seen[r]) for r in requests], [ends.get(r) for r in requests]


def edited(rng: random.Random, text: Sequence[int], share: float) -> list[int]:
    """A text in which a share of the tokens is replaced, left out or preceded by others."""
    made: list[int] = []
    for token_id in text:
        if rng.random() >= share:
            made.append(token_id)
            continue
        kind = rng.randrange(3)
        if kind != 1:
            made.append(rng.randrange(VOCAB))
        if kind == 2:
            made.append(token_id)
    return made


def drafters(asked: Sequence[Asked], ends: Sequence[Completion | None]) -> list[Drafter | None]:
    """Predictions that are right, nearly right, wrong or absent."""
    made: list[Drafter | None] = []
    for one, end in zip(asked, ends, strict=True):
        rng = random.Random(one.seed)
        drafting = rng.choice((ALWAYS, USUAL))
        share = rng.choice((None, 0.0, 0.1, 0.3, 1.0))
        text = one.prompt if end is None else end.token_ids
        predicted = None if share is None else edited(rng, text, share)
        archive = Archive() if rng.random() < 0.5 else None
        if archive is not None:
            archive.add(edited(rng, text, 0.1))
        made.append(Drafter(drafting, one.prompt, predicted, archive))
    return made


def compare(
    make: Callable[[], Executor], seeds: Sequence[int], most: int, at_once: int
) -> tuple[int, int]:
    """Tokens that were accepted and drafted, where no answer differs."""
    plain_executor, executor = make(), make()
    executor.drafting = ALWAYS
    accepted = drafted = 0
    for first in range(0, len(seeds), at_once):
        asked = [Asked(seed, most) for seed in seeds[first : first + at_once]]
        plain, plain_ends = answers(plain_executor, asked, [None] * len(asked))
        found, ends = answers(executor, asked, drafters(asked, plain_ends))
        for one, ours, wanted in zip(asked, found, plain, strict=True):
            assert ours == wanted, f"request {one.seed}"
        for end in filter(None, ends):
            t = end.timings.drafts
            assert 0 <= t.predicted_accepted <= t.predicted <= t.drafted
            assert t.predicted_accepted <= t.accepted <= min(t.drafted, len(end.token_ids))
            assert sum(t.by_place) == t.accepted
            accepted, drafted = accepted + t.accepted, drafted + t.drafted
    return accepted, drafted


def test_the_reference_gives_the_same_answers() -> None:
    accepted, drafted = compare(reference, range(60), 60, 3)
    assert accepted > 300
    assert drafted - accepted > 300, "there were wrong ones, too"


@pytest.mark.slow
def test_the_reference_gives_the_same_answers_to_a_thousand_requests() -> None:
    accepted, drafted = compare(reference, range(1000, 2000), 60, 4)
    assert accepted > 5000
    assert drafted - accepted > 5000


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_decode_kernel_gives_the_same_answers(at_once: int) -> None:
    accepted, drafted = compare(kernel, range(3000, 3060), 150, at_once)
    assert accepted > 100
    assert drafted - accepted > 100


def test_drafts_before_a_dead_end_of_a_form_fail_nobody_too_early() -> None:
    compare(kernel, [4071], 150, 1)


@pytest.mark.parametrize(
    ("at_once", "more_beside"), [(1, 7), (3, 7), (3, 2), (3, 0), (6, 7), (6, 1)]
)
def test_launches_that_draft_give_the_same_answers(at_once: int, more_beside: int) -> None:
    most_beside = [min(MAX_QUERIES, count + more_beside) for count in range(1, MAX_QUERIES + 1)]

    def make() -> KernelExecutor:
        return drafting_kernel(max(3, at_once), most_beside)

    accepted, drafted = compare(make, range(4000, 4060), 150, at_once)
    assert accepted > 100
    assert drafted - accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_launches_that_draft_give_the_same_answers_to_a_thousand_requests(at_once: int) -> None:
    accepted, drafted = compare(
        lambda: drafting_kernel(max(3, at_once)), range(5000, 6000), 150, at_once
    )
    assert accepted > 2000
    assert drafted - accepted > 2000


def test_a_right_prediction_takes_one_launch_that_drafts() -> None:
    asked, executor = greedy(161), drafting_kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    decoder = executor.decoder
    assert isinstance(decoder, FakeDecoder)
    decoder.launches.clear()
    decoder.num_rounds = 0
    _, (end,) = alone(executor, asked, plain.token_ids, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    assert end.timings.drafts.predicted_accepted == 140
    assert len(decoder.launches) <= 3, "the prompt's, and one or two of the answer"
    assert decoder.num_rounds <= 20 + 3, "(161 - 1) / 8, and the prompt's"


def longer(count: int) -> tuple[KernelExecutor, Asked, tuple[int, ...]]:
    """A kernel that drafts, a request of so many tokens, and its answer; no launch is counted."""
    asked, executor = greedy(count), drafting_kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    assert plain is not None
    decoder_of(executor).launches.clear()
    return executor, asked, plain.token_ids


def decoder_of(executor: KernelExecutor) -> FakeDecoder:
    assert isinstance(executor.decoder, FakeDecoder)
    return executor.decoder


def launches_of_answer(executor: KernelExecutor, asked: Asked) -> list[int]:
    """The first positions of launches behind the prompt."""
    starts = [launch.queries[0].position for launch in decoder_of(executor).launches]
    return [start for start in starts if start >= len(asked.prompt)]


def test_a_wrong_prediction_ends_its_launch_and_none_follows_but_a_plain_one() -> None:
    executor, asked, plain = longer(200)
    _, (end,) = alone(executor, asked, [(i + 7) % VOCAB for i in plain], PREDICTIONS)
    assert end.token_ids == plain
    starts = launches_of_answer(executor, asked)
    assert len(starts) == 2
    assert starts[1] - starts[0] <= 6 + WAIT_ROUNDS + 2, "tries, and rounds until it ended"
    assert decoder_of(executor).launches[-1].rounds == len(asked.prompt) + 199 - starts[1]


def test_a_prediction_is_followed_again_behind_what_it_lacks() -> None:
    executor, asked, plain = longer(240)
    _, (end,) = alone(executor, asked, [*plain[:80], *plain[120:]], PREDICTIONS)
    assert end.token_ids == plain
    assert len(launches_of_answer(executor, asked)) == 3, "one that drafts, a plain one, and again"
    assert end.timings.drafts.predicted_accepted > 150


def test_a_quarter_of_wrong_tokens_takes_one_launch() -> None:
    executor, asked, plain = longer(240)
    drafter = Drafter(PREDICTIONS, asked.prompt, with_wrong(plain, 0.25, VOCAB))
    executor.drafting = PREDICTIONS
    _, (end,) = answers(executor, [asked], [drafter])
    assert end is not None
    assert end.token_ids == plain
    assert len(launches_of_answer(executor, asked)) == 1
    assert end.timings.tokens_per_round > 3


def looked_up(executor: KernelExecutor, asked: Asked, archive: Archive) -> Completion:
    """Its answer with what the executor has it draft from."""
    executor.drafting = replace(PREDICTIONS, looks_up=True)
    drafter = executor.drafter(asked.prompt, None, archive)
    _, (end,) = answers(executor, [asked], [drafter])
    assert end is not None
    return end


def test_an_earlier_answer_is_looked_up_once_guesses_were_right() -> None:
    executor, asked, plain = longer(240)
    archive = Archive()
    archive.add(plain)
    end = looked_up(executor, asked, archive)
    assert end.token_ids == plain
    starts = launches_of_answer(executor, asked)
    assert len(starts) == 2, "a plain one until two guesses were right, and one that drafts"
    assert starts[1] - starts[0] < 10
    assert end.timings.drafts.accepted > 190
    assert end.timings.drafts.predicted == 0


def test_a_text_that_does_not_repeat_has_the_launch_that_it_has_without_lookup() -> None:
    executor, asked, plain = longer(40)
    assert len({*pairwise(plain)}) == 39, "no two tokens come twice"
    end = looked_up(executor, asked, Archive())
    assert end.token_ids == plain
    assert len(launches_of_answer(executor, asked)) == 1
    assert end.timings.drafts.rounds == 0


def test_texts_are_looked_up_where_the_kernel_drafts_and_a_round_is_long_enough() -> None:
    sm90, bf16 = TYPICAL["sm_90a"], Dtype.BF16
    large, small = PUBLIC["llama-3.2-1b"], read_config(shipped_folder("etude") / "config.json")
    for ranks in (1, 2):
        plan = make_plan(large, bf16, sm90, ranks=ranks)
        found = drafting_of(plan)
        assert found == replace(PREDICTIONS, looks_up=True, right_guesses=found.right_guesses)
    assert drafting_of(make_plan(large, Dtype.FP16, sm90)).looks_up
    assert not drafting_of(make_plan(small, bf16, sm90)).looks_up


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [("etude", 15, 32), ("llama-3.2-1b", 4, 5), ("qwen3-1.7b", 3, 4), ("llama-3.1-8b", 2, 2)],
)
def test_a_rest_ends_the_later_the_more_rounds_a_change_of_launches_takes(
    shape: str, least: int, most: int
) -> None:
    model = (
        read_config(shipped_folder("etude") / "config.json") if shape == "etude" else PUBLIC[shape]
    )
    plan = make_plan(model, Dtype.BF16, TYPICAL["sm_90a"])
    assert least <= drafting_of(plan).right_guesses <= most


def test_more_right_guesses_make_fewer_launches_of_a_text_that_is_seldom_followed() -> None:
    """Four tokens in a row of 25 are right, which is shorter than a long rest wants."""
    asked, executor = greedy(300), drafting_kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    seldom = [x if i % 25 < 4 else (x + 7) % VOCAB for i, x in enumerate(plain.token_ids)]
    counts = []
    for right_guesses in (2, 20):
        drafting = replace(PREDICTIONS, right_guesses=right_guesses)
        executor.decoder.launches.clear()
        _, (end,) = alone(executor, asked, seldom, drafting)
        assert end.token_ids == plain.token_ids
        counts.append(len(executor.decoder.launches))
    assert counts[0] > 2 * counts[1]
    assert counts[1] <= 3


def test_nothing_is_looked_up_for_a_form() -> None:
    executor, archive = drafting_kernel(1), Archive()
    asked = wants("form")
    _, (plain,) = answers(executor, [asked], [None])
    archive.add(plain.token_ids)
    decoder_of(executor).launches.clear()
    end = looked_up(executor, asked, archive)
    assert end.token_ids == plain.token_ids
    assert end.timings.drafts.rounds == 0


def test_predictions_of_a_form_are_drafted_by_the_host() -> None:
    executor = drafting_kernel(1)
    asked = wants("form")
    _, (plain,) = answers(executor, [asked], [None])
    _, (end,) = alone(executor, asked, plain.token_ids, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    assert end.timings.drafts.predicted_accepted > 0
    assert decoder_of(executor)._drafting is None, "no launch drafts"


@pytest.mark.parametrize("what", ["penalties", "log probabilities"])
@pytest.mark.parametrize("source", ["prediction", "lookup"])
def test_the_kernel_drafts_with_whatever_it_can_do_alone(what: str, source: str) -> None:
    executor, archive = drafting_kernel(1), Archive()
    asked = wants(what)
    wanted, (plain,) = answers(executor, [asked], [None])
    assert plain is not None
    archive.add(plain.token_ids)
    decoder_of(executor).launches.clear()
    predicted = plain.token_ids if source == "prediction" else None
    executor.drafting = replace(PREDICTIONS, looks_up=source == "lookup")
    drafter = executor.drafter(asked.prompt, predicted, archive)
    found, (end,) = answers(executor, [asked], [drafter])
    assert found == wanted, "tokens, and log probabilities"
    assert end is not None
    assert end.timings.drafts.accepted > 40
    assert decoder_of(executor)._drafting is not None
    starts = launches_of_answer(executor, asked)
    assert len(starts) <= (3 if what == "penalties" else 5)


def test_logits_of_several_rounds_are_kept() -> None:
    """Of requests that draft nothing too: eight tokens a launch, and one beside a form."""
    for others, rounds in (([], {8, 3}), ([wants("form")], {1})):
        executor, asked = drafting_kernel(2), wants("log probabilities")
        answers(executor, [asked, *others], [None] * (1 + len(others)))
        launches = decoder_of(executor).launches
        of_all = [x.rounds for x in launches if len(x.queries) == 1 + len(others)]
        assert set(of_all[:-1]) <= rounds | {1}
        assert max(of_all) == max(rounds)


def test_requests_side_by_side_share_the_queries() -> None:
    """Each has as many drafts as the others, and all of them one launch."""
    executor = drafting_kernel(3)
    asked = [greedy(81) for _ in range(3)]
    for number, one in enumerate(asked):
        one.prompt = [3, *range(4 + number, 30 + number)]
    _, plain = answers(executor, asked, [None] * 3)
    texts = [end.token_ids for end in plain if end is not None]
    decoder_of(executor).launches.clear()
    decoder_of(executor).num_rounds = 0
    executor.drafting = PREDICTIONS
    guesses = [
        Drafter(PREDICTIONS, one.prompt, text) for one, text in zip(asked, texts, strict=True)
    ]
    _, ends = answers(executor, asked, guesses)
    assert [end.token_ids for end in ends if end is not None] == texts
    drafting = [x for x in decoder_of(executor).launches if len(x.queries) == 3]
    assert len(drafting) <= 3
    # Five drafts a round for three, which also have a token each: 8 / 3 of a plain round's tokens.
    tokens = [end.timings.tokens_per_round for end in ends if end is not None]
    assert all(2.2 < count < 4.5 for count in tokens), tokens


def test_a_request_that_drafts_nothing_goes_on_beside_one_that_does() -> None:
    executor = drafting_kernel(2)
    asked = [greedy(100), greedy(100)]
    asked[1].prompt = [3, *range(20, 50)]
    _, plain = answers(executor, asked, [None, None])
    texts = [end.token_ids for end in plain if end is not None]
    executor.drafting = PREDICTIONS
    _, ends = answers(executor, asked, [Drafter(PREDICTIONS, asked[0].prompt, texts[0]), None])
    assert [end.token_ids for end in ends if end is not None] == texts
    (first, second) = (end.timings for end in ends if end is not None)
    assert first.tokens_per_round > 5
    assert second.tokens_per_round == 1


@pytest.mark.parametrize(("most_beside", "tokens"), [(8, 5.5), (7, 5), (5, 3), (4, 2), (3, 1)])
def test_a_round_has_fewer_queries_beside_a_request_without_drafts(
    most_beside: int, tokens: float
) -> None:
    executor = drafting_kernel(3, (8, 8, most_beside, 8, 8, 8, 8, 8))
    asked = [greedy(100) for _ in range(3)]
    for number, one in enumerate(asked):
        one.prompt = [3, *range(4 + number, 30 + number)]
    _, plain = answers(executor, asked, [None] * 3)
    text = next(end.token_ids for end in plain if end is not None)
    decoder_of(executor).launches.clear()
    executor.drafting = PREDICTIONS
    drafter = Drafter(PREDICTIONS, asked[0].prompt, text)
    _, ends = answers(executor, asked, [drafter, None, None])
    assert [end.token_ids for end in ends if end is not None] == [
        end.token_ids for end in plain if end is not None
    ]
    first = next(end.timings for end in ends if end is not None)
    assert first.tokens_per_round == pytest.approx(tokens, rel=0.2)
    together = [x for x in decoder_of(executor).launches if len(x.queries) == 3]
    assert len(together) <= 2, "no launch ends in vain"


def test_all_may_draft_where_beside_others_nobody_may() -> None:
    executor = drafting_kernel(2, range(1, 9))
    asked = [greedy(100), greedy(100)]
    asked[1].prompt = [3, *range(20, 50)]
    _, plain = answers(executor, asked, [None, None])
    texts = [end.token_ids for end in plain if end is not None]
    executor.drafting = PREDICTIONS
    guesses = [
        Drafter(PREDICTIONS, one.prompt, text) for one, text in zip(asked, texts, strict=True)
    ]
    _, ends = answers(executor, asked, guesses)
    assert [end.token_ids for end in ends if end is not None] == texts
    assert all(end.timings.tokens_per_round > 3 for end in ends if end is not None)


def test_who_may_not_draft_beside_one_that_rests_ends_no_launch() -> None:
    executor = drafting_kernel(2, range(1, 9))
    asked = [greedy(140), greedy(140)]
    asked[1].prompt = [3, *range(20, 50)]
    _, plain = answers(executor, asked, [None, None])
    texts = [end.token_ids for end in plain if end is not None]
    decoder_of(executor).launches.clear()
    executor.drafting = PREDICTIONS
    wrong = [(i + 7) % VOCAB for i in texts[0]]
    guesses = [
        Drafter(PREDICTIONS, one.prompt, text)
        for one, text in zip(asked, (wrong, texts[1]), strict=True)
    ]
    _, ends = answers(executor, asked, guesses)
    assert [end.token_ids for end in ends if end is not None] == texts
    together = [x for x in decoder_of(executor).launches if len(x.queries) == 2]
    assert len(together) < 6


def test_on_a_cpu_who_drafts_nothing_has_as_much_time_as_before() -> None:
    """By costs of steps: a step with seven drafts takes 3.5 times as long as one with none."""
    executor, asked = reference(), [greedy(400) for _ in range(3)]
    for number, one in enumerate(asked):
        one.prompt = [3, *range(4 + number, 30 + number)]
    _, plain = answers(executor, asked, [None] * 3)
    texts = [end.token_ids for end in plain if end is not None]
    executor.drafting = replace(USUAL, looks_up=False)
    core = EngineCore(executor)
    requests = []
    for one, text in zip(asked, (texts[0], None, None), strict=True):
        drafter = None if text is None else Drafter(executor.drafting, one.prompt, text)
        request = Request(one.prompt, one.sampler(), drafter=drafter)
        requests.append(request)
        core.submit(request)
    steps: list[list[int]] = [[], [], []]
    while (step := core.next()) is not None:
        for _ in core.do(step):
            for request, made in zip(requests, steps, strict=True):
                made.append(len(request.sampler.output_ids))
    ended = steps[0].index(400)
    begun = max(next(n for n, count in enumerate(made) if count) for made in steps)
    first, second, third = (made[ended] - made[begun] for made in steps)
    assert second == third == ended - begun > 50, "a token in each round"
    assert first / second == pytest.approx(8 / 3.5, rel=0.2), "as much quicker as alone"


def test_the_next_round_runs_while_tokens_are_told() -> None:
    asked, executor = greedy(161), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    assert plain is not None
    executor.drafting, decoder = PREDICTIONS, executor.decoder
    assert isinstance(decoder, FakeDecoder)
    drafter = Drafter(PREDICTIONS, asked.prompt, plain.token_ids)
    request = Request(asked.prompt, asked.sampler(), drafter=drafter)
    assert executor.open(request)
    while executor.read(request) is None:
        pass
    rounds = executor.rounds([request], 64)
    (outcome,) = next(rounds)
    assert isinstance(outcome, Verified)
    assert decoder.is_running, "the one behind it"
    rounds.close()
    assert not decoder.is_running, "nobody writes to pages that are given back"
    executor.free(request)
    executor.check()


def told(
    executor: KernelExecutor,
    asked: Asked,
    text: TextStream,
    drafter: Drafter | None,
    archive: Archive | None = None,
):
    """Texts as they come, and the end, of a request alone, which joins the archive."""
    core = EngineCore(executor)
    core.archive = archive
    request = Request(asked.prompt, asked.sampler(), text, drafter=drafter)
    *chunks, end = core.run(request)
    executor.check()
    assert isinstance(end, Completion)
    return [event.text for event in chunks], (end.token_ids, end.text, end.finish_reason, end.stop)


def stopped(seed: int, tokenizer: Tokenizer):
    """A request, a stop string that its answer has, what is told then, and an edited answer."""
    asked, rng = greedy(80), random.Random(seed)
    asked.prompt = [3, *(rng.randrange(4, VOCAB) for _ in range(9))]
    _, (ids, whole, *_) = told(kernel(1), asked, TextStream(tokenizer), None)
    at = rng.randrange(len(whole) - 3)
    stop = [whole[at : at + rng.randint(1, 3)]]
    plain = told(kernel(1), asked, TextStream(tokenizer, stop), None)
    assert plain[1][2] == "stop"
    return asked, stop, plain, edited(rng, ids, 0.05)


def test_a_stop_string_ends_an_answer_while_the_next_round_runs() -> None:
    """Only who joins tokens to text sees it, and a round is under way by then."""
    tokenizer = Tokenizer.from_folder(shipped_folder("etude"))
    for seed in range(40):
        asked, stop, plain, predicted = stopped(seed, tokenizer)
        executor = kernel(1)
        executor.drafting, decoder = ALWAYS, executor.decoder
        assert isinstance(decoder, FakeDecoder)
        drafter = Drafter(ALWAYS, asked.prompt, predicted)
        assert told(executor, asked, TextStream(tokenizer, stop), drafter) == plain, seed
        assert not decoder.is_running


def test_a_stop_string_ends_an_answer_within_a_launch_that_drafts() -> None:
    """It joins the texts that the host looks up in, while the kernel goes on with those before."""
    tokenizer = Tokenizer.from_folder(shipped_folder("etude"))
    for seed in range(20):
        asked, stop, plain, predicted = stopped(seed, tokenizer)
        executor, archive = drafting_kernel(1), Archive()
        executor.drafting = ALWAYS
        drafter = Drafter(ALWAYS, asked.prompt, predicted, archive)
        text = TextStream(tokenizer, stop)
        assert told(executor, asked, text, drafter, archive) == plain, seed
        assert list(archive.ids[: len(plain[1][0])]) == list(plain[1][0])


ALIGNED = {
    name: config
    for name, config in MODELS.items()
    if all(x.attention.head_dim % 16 == 0 for x in config.layers) and config.lanes is None
}


@pytest.mark.parametrize("config", ALIGNED.values(), ids=ALIGNED)
def test_tokens_of_one_step_have_the_bits_of_steps_of_their_own(config: ModelConfig) -> None:
    torch.set_num_threads(1)
    assert rows_keep_bits(config)
    reference = build_reference(config, random_weights(config))
    ids = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0))
    for count in range(2, 9):
        single, several = reference.new_cache(60), reference.new_cache(60)
        for cache in (single, several):
            reference.forward(ids[:40], 0, cache, "none")
        wanted = [
            reference.forward(ids[i : i + 1], i, single).clone() for i in range(40, 40 + count)
        ]
        found = reference.forward(ids[40 : 40 + count], 40, several, "all", by_rows=True)
        assert torch.equal(found, torch.cat(wanted)), count
        for block in range(single.num_blocks):
            views = zip(
                single.view(block, 0, 40 + count), several.view(block, 0, 40 + count), strict=True
            )
            assert all(torch.equal(a, b) for a, b in views)


def test_columns_pay_only_where_it_was_measured() -> None:
    cpu, fp32 = torch.device("cpu"), torch.float32
    assert columns_pay(CONFIG, fp32, cpu)
    assert not columns_pay(CONFIG, torch.bfloat16, cpu)
    assert not columns_pay(CONFIG, fp32, torch.device("cuda"))
    assert not columns_pay(replace(CONFIG, vocab_size=2**20), fp32, cpu), "16 MiB are 2^22 values"
    narrow = model(Attention(4, 2, 8), context_tokens=600)
    assert not columns_pay(narrow, fp32, cpu)


def test_a_machine_whose_rows_differ_drafts_nothing(monkeypatch) -> None:
    def told_apart(gate: torch.Tensor, _: str) -> None:
        gate.mul_(len(gate))

    monkeypatch.setattr("soloist.reference.columns.activate", told_apart)
    assert not rows_keep_bits(CONFIG)
    one = ReferenceModel(CONFIG, random_weights(CONFIG), 600, drafts=True)
    assert one.drafting is None
    monkeypatch.undo()
    assert ReferenceModel(CONFIG, random_weights(CONFIG), 600, drafts=True).drafting is not None
    assert ReferenceModel(CONFIG, random_weights(CONFIG), 600).drafting is None


def alone(executor: Executor, asked: Asked, predicted: Sequence[int], drafting: Drafting):
    executor.drafting = drafting
    return answers(executor, [asked], [Drafter(drafting, asked.prompt, predicted)])


def greedy(most: int) -> Asked:
    asked = Asked(0, most)
    asked.params, asked.form = SamplingParams(max_tokens=most, ignore_eos=True), None
    asked.top_logprobs, asked.scores = None, "answer"
    return asked


def wants(what: str) -> Asked:
    asked = greedy(60)
    if what == "penalties":
        asked.params = replace(asked.params, presence_penalty=0.5)
    elif what == "form":
        asked.form = "drawn"
    else:
        asked.top_logprobs = 1
    return asked


def test_a_right_prediction_takes_an_eighth_of_the_launches() -> None:
    asked, executor = greedy(161), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    executor.decoder.launches.clear()
    _, (end,) = alone(executor, asked, plain.token_ids, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    launches = [x for x in executor.decoder.launches if len(x.queries) == 8]
    assert len(launches) == 20, "(161 - 1) / 8"
    assert end.timings.drafts.predicted_accepted == 140
    assert end.timings.tokens_per_round == 8


def test_rounds_behind_right_drafts_are_prepared_while_those_before_them_run() -> None:
    asked, executor = greedy(161), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    executor.decoder.num_expected = executor.decoder.num_prepared = 0
    alone(executor, asked, plain.token_ids, PREDICTIONS)
    assert executor.decoder.num_expected == executor.decoder.num_prepared == 19, "but the first"


def test_behind_a_wrong_draft_another_round_starts_than_was_prepared() -> None:
    asked, executor = greedy(161), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    often = edited(random.Random(0), plain.token_ids, 0.1)
    _, (end,) = alone(executor, asked, often, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    decoder = executor.decoder
    assert 0 < decoder.num_expected < decoder.num_prepared < end.timings.drafts.rounds


@pytest.mark.parametrize("what", ["penalties", "form", "log probabilities"])
def test_nothing_is_prepared_that_has_to_be_written_between_rounds(what: str) -> None:
    asked, executor = wants(what), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    _, (end,) = alone(executor, asked, plain.token_ids, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    assert end.timings.drafts.rounds > 0
    assert executor.decoder.num_prepared == 0


def test_a_wrong_prediction_is_looked_at_less_and_less_often() -> None:
    asked, executor = greedy(200), kernel(1)
    _, (plain,) = answers(executor, [asked], [None])
    executor.decoder.launches.clear()
    wrong = [(i + 7) % VOCAB for i in plain.token_ids]
    _, (end,) = alone(executor, asked, wrong, PREDICTIONS)
    assert end.token_ids == plain.token_ids
    assert end.timings.drafts.rounds <= 6, "then the place is lost, and nothing is expected"
    assert len(launches_of_answer(executor, asked)) <= 7, "wrong ones, and all of the rest"


def test_requests_side_by_side_have_one_query_each_where_the_host_drafts() -> None:
    executor = kernel()
    executor.drafting = PREDICTIONS
    asked = [greedy(40), greedy(40)]
    guess = [Drafter(PREDICTIONS, one.prompt, [5] * 40) for one in asked]
    answers(executor, asked, guess)
    shared = [x for x in executor.decoder.launches if len({q.sequence for q in x.queries}) == 2]
    assert shared
    assert {len(x.queries) for x in shared} == {2}


def test_a_step_that_fails_behind_right_drafts_keeps_their_tokens() -> None:
    asked, executor = greedy(60), reference()
    _, (plain,) = answers(executor, [asked], [None])
    forward, calls = executor.reference.forward, [0]

    def fails_later(ids, position, cache, rows="last", **more):
        logits = forward(ids, position, cache, rows, **more).clone()
        at = len(asked.prompt) + 20  # the token at this place cannot be chosen
        for row in range(len(ids)):
            if rows != "none" and position + row + 1 == at:
                logits[row if rows == "all" else -1] = torch.nan
                calls[0] += 1
        return logits

    executor.reference.forward = fails_later
    wanted, _ = answers(executor, [asked], [None])
    found, _ = alone(executor, asked, plain.token_ids, ALWAYS)
    assert found == wanted
    assert "is nan" in str(found[0][-1]).lower()
    assert calls[0] >= 3, "once without drafts; with them in a draft, and at once"
