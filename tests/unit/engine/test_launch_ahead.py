"""The launch behind a prompt begins with its first token, and is the one that is wanted."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from soloist.engine import kernel_executor
from soloist.engine.core import EngineCore
from soloist.engine.drafting import PREDICTIONS
from soloist.engine.kernel_executor import KernelExecutor
from soloist.engine.launch_ahead import LaunchAhead
from soloist.engine.request import Request
from soloist.errors import KernelStuck
from soloist.megakernel.drafting import DraftingLaunch, DraftingSequence
from soloist.megakernel.launch import Query
from soloist.sampling import Sampler, SamplingParams
from soloist.speculation import Archive, Costs, Drafter, Drafting
from unit.engine.fakes import VOCAB, Cache, FakeDecoder, FakePrefill

PROMPT = [3, *range(10, 40)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=7)
LOOKUP = Drafting(Costs((1300,) * 7), looks_up=True)


def kernel(*, prepares: bool = True, drafts: bool = False) -> KernelExecutor:
    cache = Cache()
    decoder = FakeDecoder(cache, 4096, 3)
    executor = KernelExecutor(decoder, FakePrefill(cache), 40, VOCAB, keeps_prefixes=True)
    if not prepares:
        executor._prepare_launch = lambda _: None
    executor.drafts_in_kernel, executor.drafting = drafts, PREDICTIONS
    return executor


def request(
    params: SamplingParams = GREEDY,
    predicted: Sequence[int] | None = None,
    prompt: Sequence[int] = PROMPT,
    **more: object,
) -> Request:
    drafter = None if predicted is None else Drafter(PREDICTIONS, prompt, predicted)
    return Request(prompt, Sampler(params, VOCAB, prompt, (3,)), drafter=drafter, **more)


def ids(core: EngineCore, *requests: Request) -> list[list[int]]:
    for one in requests:
        core.submit(one)
    while core.requests:
        if (step := core.next()) is not None:
            for _ in core.do(step):
                pass
    core.executor.check()
    return [one.sampler.output_ids for one in requests]


def first_launch(decoder: FakeDecoder) -> Query:
    (query,) = decoder.launches[0].queries
    return query


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_request_alone_starts_what_is_ready(params: SamplingParams) -> None:
    executor, other = kernel(), kernel(prepares=False)
    (found,), (wanted,) = (
        ids(EngineCore(executor), request(params)),
        ids(EngineCore(other), request(params)),
    )
    assert found == wanted
    assert len(found) == 30
    decoder = executor.decoder
    assert decoder.num_prepared == decoder.num_expected == 1
    assert first_launch(decoder).tokens == found[:1], "not the guess"
    assert [replace(x.queries[0], choice=None) for x in decoder.launches] == [
        replace(x.queries[0], choice=None) for x in other.decoder.launches
    ]


def test_noise_of_the_first_token_is_made_while_the_prompt_is_read(monkeypatch) -> None:
    executor, did = kernel(), []
    for owner, name in ((executor.prefill, "run"), (Sampler, "prepare"), (Sampler, "pick")):
        call = getattr(owner, name)

        def told(*args: object, _call=call, _name=name, **more: object) -> object:
            did.append((_name, args[1] if _name == "prepare" else None))
            return _call(*args, **more)

        monkeypatch.setattr(owner, name, told)
    ids(EngineCore(executor), request(SAMPLED))
    assert did == [("run", None), ("prepare", len(PROMPT)), ("pick", None)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("right", [True, False])
def test_a_predicted_answer_starts_what_is_ready_if_its_first_token_is_right(
    params: SamplingParams, *, right: bool
) -> None:
    (plain,) = ids(EngineCore(kernel()), request(params))
    predicted = plain if right else [(plain[0] + 1) % VOCAB, *plain[1:]]
    executor = kernel(drafts=True)
    (found,) = ids(EngineCore(executor), request(params, predicted))
    assert found == plain
    decoder = executor.decoder
    assert decoder.num_prepared == 1
    assert decoder.num_expected == right
    assert len(decoder.launches) == 1, "it drafts"


def test_a_prediction_of_no_token_of_the_model_changes_nothing() -> None:
    (plain,) = ids(EngineCore(kernel()), request())
    executor = kernel(drafts=True)
    assert ids(EngineCore(executor), request(predicted=[VOCAB + 5, *plain[1:]])) == [plain]


def test_a_request_that_looks_up_from_the_start_starts_what_is_ready() -> None:
    (plain,) = ids(EngineCore(kernel()), request())
    executor, archive = kernel(drafts=True), Archive()
    archive.add(plain)
    for predicted in (None, plain):
        one = request()
        one.drafter = Drafter(LOOKUP, PROMPT, predicted, archive)
        assert ids(EngineCore(executor), one) == [plain]
    assert executor.decoder.num_expected == executor.decoder.num_prepared == 2


def test_where_the_host_drafts_nothing_is_ready_before_the_first_round() -> None:
    (plain,) = ids(EngineCore(kernel()), request())
    executor = kernel()
    read = executor.read

    def counted(one: Request) -> object:
        picked = read(one)
        assert executor.decoder.num_prepared == 0
        return picked

    executor.read = counted
    assert ids(EngineCore(executor), request(predicted=plain)) == [plain]


@pytest.mark.parametrize(
    "asked",
    [
        lambda: request(replace(GREEDY, presence_penalty=0.5)),
        lambda: request(top_logprobs=0),
        lambda: request(replace(GREEDY, max_tokens=1)),
    ],
    ids=["penalties", "log probabilities", "one token"],
)
def test_what_a_first_token_changes_is_not_made_ready(asked: Callable[[], Request]) -> None:
    executor = kernel()
    (found,) = ids(EngineCore(executor), asked())
    assert found
    assert executor.decoder.num_prepared == 0


def test_nothing_is_ready_for_requests_side_by_side() -> None:
    executor, prompts = kernel(), (PROMPT, [3, *range(25, 55)])
    alone = [ids(EngineCore(kernel()), request(prompt=p))[0] for p in prompts]
    core = EngineCore(executor, most_waiting=2)
    assert ids(core, *(request(prompt=p) for p in prompts)) == alone
    assert executor.decoder.num_prepared == 0


def test_what_has_begun_ends_where_a_request_comes_with_the_first_token() -> None:
    executor, prompt = kernel(), [3, *range(25, 55)]
    alone = [ids(EngineCore(kernel()), request(prompt=p))[0] for p in (PROMPT, prompt)]
    core, late = EngineCore(executor, most_waiting=1), request(prompt=prompt)
    first = request()
    first._listen = lambda: late in core.requests or late.is_finished or core.submit(late)
    assert ids(core, first)[0] == alone[0]
    assert late.sampler.output_ids == alone[1]
    decoder = executor.decoder
    assert decoder.num_expected == 1
    begun, *others = (launch for launch in decoder.launches if len(launch.queries) == 1)
    assert begun.queries[0].tokens == alone[0][:1]
    assert others[0].queries[0].position == begun.queries[0].position, "from the same token on"


def test_what_is_ready_is_not_started_where_the_first_token_was_the_last() -> None:
    (plain,) = ids(EngineCore(kernel()), request())
    executor = kernel()
    core = EngineCore(executor)
    ends = request(replace(GREEDY, stop_token_ids=frozenset(plain[:1])))
    assert ids(core, ends) == [plain[:1]]
    assert executor.decoder.launches == []
    assert executor.decoder.num_prepared == 1
    prompt = [3, *range(25, 55)]
    assert ids(core, request(prompt=prompt)) == ids(EngineCore(kernel()), request(prompt=prompt))


@pytest.mark.parametrize("drafts", [False, True])
def test_what_has_begun_ends_where_a_request_is_cancelled_with_its_first_token(
    *, drafts: bool
) -> None:
    (plain,) = ids(EngineCore(kernel()), request())
    executor = kernel(drafts=drafts)
    core, one = EngineCore(executor), request(predicted=plain if drafts else None)
    one._listen = one.cancel
    assert ids(core, one) == [plain[:1]]
    assert executor.decoder.num_expected == 1
    assert not executor.decoder.is_running
    assert executor.decoder.num_rounds == 1
    assert ids(core, request()) == [plain]


def test_who_closes_a_request_alone_ends_what_has_begun() -> None:
    executor = kernel()
    events = EngineCore(executor).run(request())
    next(events)
    assert executor.decoder.is_running
    events.close()
    assert not executor.decoder.is_running
    executor.check()


QUERY = Query(0, 0, [5], stops=[3])


def launch(
    output: Sequence[int] = (5,),
    most: int = 20,
    archive: Sequence[int] = (7, 8),
    predicted: Sequence[int] | None = range(5, 40),
    prompt: Sequence[int] = PROMPT,
) -> DraftingLaunch:
    kept = Archive()
    kept.add(archive)
    drafter = Drafter(LOOKUP, prompt, predicted, kept)
    draft = drafter.draft(output, 7)
    one = DraftingSequence(drafter.state, draft, prompt, output, most)
    return DraftingLaunch((one,), most)


def started(query: Query, rounds: int, given: DraftingLaunch | None) -> bool:
    """Whether a launch is the one that has begun for `QUERY`, of 20 rounds or `launch()`."""
    decoder = FakeDecoder(Cache())
    ahead = LaunchAhead(decoder)
    ahead.prepare(QUERY, 20, None if given is None else launch())
    ahead.begin(5)
    assert decoder.num_expected == 1
    if given is None:
        ahead.start([query], rounds)
    else:
        ahead.start_drafting([query], given)
    assert decoder.is_running
    ended = decoder.num_rounds == 1
    assert ended == (len(decoder.launches) == 2), "no round is too many if it is the same"
    return not ended


def test_only_the_same_launch_is_started() -> None:
    assert started(QUERY, 20, None)
    assert started(QUERY, 20, launch())
    others = {
        "sequence": 1, "position": 1, "stops": [3, 4], "stride": 2, "keep": 1, "tokens": [9],
    }  # fmt: skip
    for name, value in others.items():
        query = replace(QUERY, **{name: value})
        assert not started(query, 20, None), name
        assert not started(query, 20, launch()), name
    assert not started(QUERY, 19, None)


@pytest.mark.parametrize(
    "other",
    [
        {"most": 19},
        {"archive": (7, 8, 9)},
        {"archive": ()},
        {"predicted": None},
        {"predicted": range(5, 41)},
        {"prompt": [*PROMPT[:-1], 9]},
    ],
    ids=str,
)
def test_a_launch_with_other_texts_is_another_one(other: dict[str, object]) -> None:
    assert not launch(**other).is_like(launch())
    assert not started(QUERY, 20, launch(**other))


def test_what_is_ready_but_has_not_begun_is_not_started() -> None:
    decoder = FakeDecoder(Cache())
    ahead = LaunchAhead(decoder)
    ahead.prepare(QUERY, 20)
    ahead.end()
    ahead.begin(5)
    ahead.start([QUERY], 20)
    assert decoder.num_expected == 0
    assert len(decoder.launches) == 1


@pytest.mark.parametrize("error", [ValueError("a mistake"), KernelStuck("here", "that", "this")])
def test_a_launch_that_fails_unwanted_costs_nobody_anything_but_the_device(
    error: Exception,
) -> None:
    decoder = FakeDecoder(Cache())
    ahead = LaunchAhead(decoder)
    ahead.prepare(QUERY, 20)
    ahead.begin(5)
    decoder.fault = error
    with pytest.raises(KernelStuck) if isinstance(error, KernelStuck) else nullcontext():
        ahead.end()
    decoder.fault = None
    ahead.start([QUERY], 20)
    assert len(decoder.launches) == 2


def test_drafts_begin_with_the_token_that_they_follow() -> None:
    for given, first, begins in ((None, 9, True), (launch(), 9, False), (launch(), 5, True)):
        decoder = FakeDecoder(Cache())
        ahead = LaunchAhead(decoder)
        ahead.prepare(QUERY, 20, given)
        ahead.begin(first)
        assert decoder.is_running == begins


def test_nothing_is_made_ready_that_the_first_token_would_wait_for(monkeypatch) -> None:
    monkeypatch.setattr(kernel_executor, "_are_there", lambda _: True)
    early, late = kernel(), kernel(prepares=False)
    wanted = ids(EngineCore(late), request())
    assert ids(EngineCore(early), request()) == wanted
    assert early.decoder.num_prepared == early.decoder.num_expected == 0
