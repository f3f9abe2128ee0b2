"""The launch that begins with a prompt's first token makes the tokens of one that begins later."""

from functools import cache

import pytest

from end_to_end.test_gpu_loop import events_of
from soloist.engine import Completion, Engine, EngineConfig, kernel_executor
from soloist.engine.events import Chunk
from soloist.engine.kernel import KernelModel
from soloist.engine.loop import EngineLoop
from soloist.engine.request import Request
from soloist.sampling import SamplingParams

pytestmark = pytest.mark.gpu

TEXT = "# Words of a text, sorted by how often they come.\n" * 12 + "def count_words(text):\n"
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, top_p=0.95, seed=5)


@cache
def engine(ranks: int) -> Engine:
    """étude on so many ranks that share GPU 0."""
    shared = (0,) * ranks if ranks > 1 else ()
    return Engine.load(
        EngineConfig("etude", device="cuda:0", context_tokens=4096, rank_devices=shared)
    )


class Counted:
    """A loop over the model, and how many launches began with a first token."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, model = engine(ranks), engine(ranks).model
        assert isinstance(model, KernelModel)
        self.model, self.num_begun, self._patch = model, 0, monkeypatch
        start = model.decoder.start_next

        def counted(first: int | None = None) -> None:
            self.num_begun += 1
            start(first)

        monkeypatch.setattr(model.decoder, "start_next", counted)
        # The GPU reads these prompts sooner than the host asks whether it has.
        monkeypatch.setattr(kernel_executor, "_are_there", lambda _: False)
        self.ids = self.engine.tokenizer.encode(TEXT)
        self.loop = EngineLoop(model, self.engine.tokenizer, self.engine.config.vocab_size)

    def answer(self, params: SamplingParams, **more: object) -> tuple[int, ...]:
        end = events_of(self.loop.submit(self.ids, params, **more))[-1]  # type: ignore[arg-type]
        assert isinstance(end, Completion)
        return end.token_ids

    def later(self, params: SamplingParams) -> tuple[int, ...]:
        """The answer where nothing is made ready."""
        with self._patch.context() as patch:
            patch.setattr(self.model, "_prepare_launch", lambda _: None)
            before = self.num_begun
            made = self.answer(params)
            assert self.num_begun == before
        return made


@pytest.fixture(params=[1, 2])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(request.param, monkeypatch)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_the_same(counted: Counted, params: SamplingParams) -> None:
    wanted = counted.later(params)
    assert len(wanted) == 40
    for _ in range(3):
        assert counted.answer(params) == wanted
    assert counted.num_begun == 3
    assert counted.answer(params, prediction_ids=list(wanted)) == wanted
    assert counted.num_begun == 4
    wrong = [(wanted[0] + 1) % counted.engine.config.vocab_size, *wanted[1:]]
    assert counted.answer(params, prediction_ids=wrong) == wanted
    assert counted.num_begun == 4, "its draft follows another token"
    assert counted.loop.close()


def test_a_request_that_comes_with_the_first_token_changes_no_token(counted: Counted) -> None:
    wanted = counted.later(SAMPLED)
    late = []

    def listen() -> None:
        if not late:
            late.append(counted.loop.submit(counted.ids, SAMPLED))

    assert counted.answer(SAMPLED, listen=listen) == wanted
    end = events_of(late[0])[-1]
    assert isinstance(end, Completion)
    assert end.token_ids == wanted
    assert counted.num_begun >= 1
    assert counted.loop.close()


def test_a_request_cancelled_with_its_first_token_leaves_no_launch(counted: Counted) -> None:
    wanted = counted.later(GREEDY)
    tickets: list[Request] = []

    def listen() -> None:
        for one in tickets:
            one.cancel()

    tickets.append(counted.loop.submit(counted.ids, GREEDY, listen=listen))
    events = events_of(tickets[0])
    assert sum(len(e.token_ids) for e in events if isinstance(e, Chunk)) < 40
    assert counted.num_begun == 1
    assert counted.answer(GREEDY) == wanted
    counted.model.check()
    assert counted.loop.close()
