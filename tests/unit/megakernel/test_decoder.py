"""What the host does for a launch: counted, since a GPU stands still meanwhile."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plan.shapes import SMALL
from soloist.megakernel import decoder as module
from soloist.megakernel import kernel
from soloist.megakernel.abi import DRAFT_START, params
from soloist.megakernel.choice import Choice
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.drafting import DraftingLaunch, DraftingSequence
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.launch import LAUNCH_WORDS, Query
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import make_plan
from soloist.model.dtype import Dtype
from soloist.sampling import SamplingParams
from soloist.sampling.adjust import TokenCounts
from soloist.speculation import Costs, Drafter, Drafting

PLAN = make_plan(SMALL, Dtype.BF16, TYPICAL["sm_90a"])
ROUNDS = 9


class Gpu:
    """Ends a launch when the host waits for it, and not before it has looked a few times."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.decoder: Decoder
        self.looks = 0

    def launch(self, *_: object, **__: object) -> None:
        self.did.append("launch")
        self.looks = 0

    def record(self, _: object) -> None:
        self.did.append("record")

    def query(self) -> bool:
        """Whether the launch has ended; a round more is over."""
        return self.ends_after(self.decoder._most_rounds)

    def ends_after(self, rounds: int) -> bool:
        self.looks += 1
        self.decoder._signal_values[0] = min(self.looks, rounds)
        return self.looks > rounds

    def synchronize(self) -> None:
        self.did.append("synchronize")
        self.looks = ROUNDS


class Operations(TorchDispatchMode):
    """Lists what torch would tell a GPU to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.overloadpacket.__name__) not in {"slice", "detach", "view", "alias"}:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu, zeros = Gpu(), torch.zeros

    def unpinned(*args, **more):
        return zeros(*args, **more | {"pin_memory": False})

    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: gpu)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(kernel, "decode_sources", lambda *_: (None, None))
    monkeypatch.setattr(kernel, "load_or_build", lambda *_: None)
    loaded = SimpleNamespace(launch=gpu.launch, make_ready=lambda _: None)
    monkeypatch.setattr(kernel, "Module", lambda *_: loaded)
    monkeypatch.setattr(module.Decoder, "_measure_embedding", lambda _: 1.0)
    weights = PackedWeights(torch.zeros(1), torch.zeros(1), None, None)
    rope, pool = torch.zeros(64, 2, 2), torch.zeros(1, 4)
    gpu.decoder = Decoder(PLAN, weights, rope, pool, max_rounds=ROUNDS)
    gpu.decoder.prepare_sampling()
    return gpu


def queries(first: int = 0) -> list[Query]:
    params = SamplingParams(temperature=1.0, seed=1, logit_bias={5: 1.0, 7: -1.0})
    counts = TokenCounts(SMALL.vocab_size, [1, 2])
    return [Query(0, first + c, [c], choice=Choice(params, counts)) for c in range(8)]


def test_a_round_behind_another_one_is_one_call(gpu: Gpu) -> None:
    decoder = gpu.decoder
    decoder.start(queries(), 1)
    with Operations() as uploads:
        decoder.prepare_next(queries(8), 1)
    # What it is given, buffers of the exchanges and of sampling: nothing grows with the vocabulary,
    # and biases are there since the launch before.
    assert uploads.names == ["copy_", "copy_", "zero_"]
    decoder._shown[0, :8] = range(8)
    assert list(decoder.tokens()) == [[*range(8)]]
    gpu.did.clear()
    with Operations() as operations:
        decoder.start_next()
    assert gpu.did == ["launch", "record"]
    assert operations.names == []
    assert not decoder._signal_values.any(), "the launch before told of a round"


def test_what_is_prepared_does_not_touch_the_launch_that_runs(gpu: Gpu) -> None:
    decoder = gpu.decoder
    decoder.start(queries(), 1)
    running = decoder._given_on_host[0]
    given = running.clone()
    decoder.prepare_next(queries(8)[:3], 1)
    assert torch.equal(running, given), "its copy may be still to come"
    decoder._shown[0, :8] = range(8)
    assert list(decoder.tokens()) == [[*range(8)]], "eight queries, not three"
    # Another launch than the one that was prepared may come, too.
    decoder.start(queries(4)[:2], 1)
    assert list(decoder.tokens()) == [[0, 1]]


def test_a_first_token_that_came_later_is_read_where_the_host_writes_it(gpu: Gpu) -> None:
    decoder, query = gpu.decoder, queries(5)[0]
    decoder.start([replace(query, tokens=[9])], ROUNDS)
    wanted = decoder._given.clone()
    decoder._signal_values[0] = ROUNDS
    decoder.prepare_next([query], ROUNDS)
    (word,) = (wanted != decoder._given).nonzero().tolist()
    assert word == [LAUNCH_WORDS], "the token is all that is not known"
    assert decoder._prepared is not None
    struct = params(PLAN.ranks, drafts=False, experts=PLAN.has_experts)
    record = np.frombuffer(bytes(decoder._prepared.params), struct.dtype)[0]
    gpu.did.clear()
    with Operations() as operations:
        decoder.start_next(9)
    assert operations.names == []
    assert gpu.did == ["launch", "record"]
    read = decoder._given_on_host[0][LAUNCH_WORDS:]
    assert (record["forced"], read[0]) == (read.data_ptr(), 9)


def test_a_launch_that_drafts_is_prepared_as_it_is_started(gpu: Gpu) -> None:
    decoder, drafting = gpu.decoder, Drafting(Costs((1300,) * 7), looks_up=False)
    drafter = Drafter(drafting, [5] * 3, [*range(30)])
    one = DraftingSequence(drafter.state, drafter.draft([0], 7), [5] * 3, [0], ROUNDS)
    launch = DraftingLaunch((one,), ROUNDS)
    query = replace(queries(3)[0], tokens=[0])
    decoder.start_drafting([query], launch)
    given, texts = decoder._given.clone(), decoder._texts.clone()
    decoder._given.zero_()
    decoder._texts.zero_()
    gpu.did.clear()
    decoder.prepare_next_drafting(query, launch)
    assert gpu.did == []
    used = 4 * PLAN.grid_blocks + 30
    assert torch.equal(decoder._given, given)
    assert torch.equal(decoder._texts[:used], texts[:used])
    with Operations() as operations:
        decoder.start_next()
    assert operations.names == []
    assert gpu.did == ["launch", "record"]


def test_page_tables_are_written_among_the_copies_of_launches(gpu: Gpu, monkeypatch) -> None:
    decoder, streams = gpu.decoder, []
    decoder.page_tables.fill_(7)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext(streams.append(s)))
    decoder.write_pages(2, [5])
    assert streams == [decoder._stream]
    assert decoder.page_tables[2].tolist() == [5] + [7] * (decoder.page_tables.shape[1] - 1)
    assert (decoder.page_tables[[0, 1, 3]] == 7).all()


@pytest.mark.parametrize("num_prompt", [3, 3000])
def test_texts_of_a_launch_that_drafts_are_one_copy(gpu: Gpu, num_prompt: int) -> None:
    decoder, drafting = gpu.decoder, Drafting(Costs((1300,) * 7), looks_up=False)
    prompt, predicted, output = [5] * num_prompt, [*range(30)], [0, 1]
    drafter = Drafter(drafting, prompt, predicted)
    draft = drafter.draft(output, 7)
    one = DraftingSequence(drafter.state, draft, prompt, output, ROUNDS)
    launch = DraftingLaunch((one,), ROUNDS)
    query = replace(queries(num_prompt + 1)[0], tokens=[1])
    decoder.start_drafting([query], launch)
    decoder._signal_values[0] = ROUNDS
    with Operations() as uploads:
        decoder.start_drafting([query], launch)
    assert uploads.names == ["copy_", "copy_", "zero_", "copy_"], "as other launches, and texts"
    texts, buffers = decoder._texts, decoder._upload_texts(launch)
    start_at = (int(buffers["starts"]) - texts.data_ptr()) // 4
    words = texts[start_at : start_at + DRAFT_START.num_bytes // 4].numpy()
    (start,) = words.view(DRAFT_START.dtype)
    places = {"records": buffers["records"], **{name: start[name] for name in one.texts}}
    assert len(texts) < 4 * PLAN.grid_blocks + 3000, "the prompt is not there"

    def at(name: str, count: int) -> list[int]:
        place = int(places[name]) - texts.data_ptr()
        assert place % 16 == 0
        return texts[place // 4 : place // 4 + count].tolist()

    assert at("records", 4 * PLAN.grid_blocks) == [0] * 4 * PLAN.grid_blocks
    assert at("prediction", 30) == predicted
    assert at("history", 2) == output
    assert start == one.start(0, {name: int(start[name]) for name in one.texts})


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_nobody_sleeps_before_the_last_round(
    gpu: Gpu, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest sleep takes longer than the host's part of a round."""
    monkeypatch.setattr(time, "sleep", lambda _: gpu.did.append("sleep"))
    gpu.decoder.start(queries()[:1], rounds)
    gpu.did.clear()
    assert len(list(gpu.decoder.tokens())) == rounds
    assert gpu.did.count("synchronize") == 1
    assert "sleep" not in gpu.did[gpu.did.index("synchronize") :]


def test_nobody_sleeps_before_a_round_that_may_make_all_tokens_left(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, most = gpu.decoder, 8 * ROUNDS
    monkeypatch.setattr(time, "sleep", lambda _: gpu.did.append("sleep"))
    monkeypatch.setattr(decoder, "max_rounds", most)
    drafter = Drafter(Drafting(Costs((1300,) * 7), looks_up=False), [1], [0] * 200)
    one = DraftingSequence(drafter.state, drafter.draft([0], 7), [1], [0], most)
    launch = DraftingLaunch((one,), most)
    monkeypatch.setattr(decoder, "_given_on_host", [torch.zeros(4096, dtype=torch.int32)] * 2)
    monkeypatch.setattr(decoder, "_given", torch.zeros(4096, dtype=torch.int32))
    decoder.start_drafting([replace(queries(1)[0], tokens=[0])], launch)
    decoder._shown_drafted[:ROUNDS] = [*range(8), 8 | 7 << 4, *[0] * 6]
    monkeypatch.setattr(gpu, "query", lambda: gpu.ends_after(ROUNDS))
    gpu.did.clear()
    assert len(list(decoder.drafted_rounds())) == ROUNDS
    assert gpu.did.count("synchronize") == 1
    assert gpu.did.index("synchronize") == len(gpu.did) - 1
    assert "sleep" in gpu.did
