"""Launches of several ranks: their order, what comes of them, what is told when one fails."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from plan.shapes import SMALL
from soloist.errors import DeviceError, KernelStuck, LaunchError
from soloist.kv.pool import PagePool
from soloist.megakernel import ranks as module
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch, DraftingSequence
from soloist.megakernel.fault import Fault
from soloist.megakernel.gpu import TYPICAL
from soloist.megakernel.launch import Given, Query
from soloist.megakernel.limits import KEPT_ROUNDS
from soloist.megakernel.plan import make_plan
from soloist.megakernel.ranks import Ranks
from soloist.model.dtype import Dtype
from soloist.parallel.share import Share
from soloist.speculation import Archive, Costs, Draft, Drafter, Drafting

RANKS = 4
PLAN = make_plan(SMALL, Dtype.BF16, replace(TYPICAL["sm_90a"], num_sms=5), RANKS)
ROWS, VOCAB = PLAN.head.matrix.units * 8, SMALL.vocab_size


class FakeDecoder:
    """Says what is done with it, and makes the tokens it was told to."""

    def __init__(self, rank: int, log: list[tuple[str, int]]) -> None:
        self.plan, self.rank, self.log, self.max_rounds = PLAN, rank, log, 100
        self.pool = PagePool(1, 1, 32, 1, torch.bfloat16, torch.device("cpu")).tensor
        self.kept_logits = torch.zeros(KEPT_ROUNDS, 8, ROWS)
        self.logits = self.kept_logits[0]
        self.error: DeviceError | None = None
        self.end: str | None = ""
        self.fault: Fault | None = None

    def pack(self, queries: object, rounds: int) -> tuple[object, int]:
        self.log.append(("pack", self.rank))
        return queries, rounds

    def prepare(
        self,
        given: object,
        logits: torch.Tensor | None = None,
        drafting: object = None,
        *,
        awaits_first: bool = False,
    ) -> None:
        self.log.append(("prepare", self.rank))
        self.given, self.kept, self.drafting = given, logits, drafting
        self.awaits_first = awaits_first

    def renew(self, first: int | None) -> None:
        self.log.append((f"renew {first}", self.rank))

    def await_copies(self) -> None:
        self.log.append(("await", self.rank))

    def go(self) -> None:
        self.log.append(("go", self.rank))

    def mark_end(self) -> None:
        self.log.append(("mark", self.rank))

    def tokens(self) -> Iterator[list[int]]:
        if self.kept is not None:
            own = Share(SMALL, RANKS, self.rank).vocabulary
            ids = torch.arange(own.start, own.start + ROWS).float()
            self.kept.copy_(ids.where(ids < own.stop, -1))
        yield [7]
        if self.error is not None:
            raise self.error
        yield [8]

    def drafted_rounds(self) -> Iterator[list[DraftedRound]]:
        yield [DraftedRound((7, 8), 1, 0)]
        if self.error is not None:
            raise self.error

    def ending(self) -> str | None:
        return self.end


class Made:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.decoders = [FakeDecoder(rank, self.log) for rank in range(RANKS)]
        monkeypatch.setattr(module, "allow_access", lambda _: None)
        monkeypatch.setattr(module, "_require_fit", lambda *_: None)
        monkeypatch.setattr(module, "_REPORTS_S", 0.05)
        for step in ("await_copies", "go", "mark_end"):
            monkeypatch.setattr(module.Decoder, step, getattr(FakeDecoder, step))
        self.ranks = Ranks(self.decoders)  # type: ignore[arg-type]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_no_rank_starts_before_all_are_prepared_or_is_marked_before_all_started(made: Made) -> None:
    assert made.ranks.run([Query(0, 0, [1])], 2) == [[7], [8]]
    steps = [step for step, _ in made.log]
    assert steps == ["pack", *["prepare"] * 4, *["await"] * 4, *["go"] * 4, *["mark"] * 4]
    assert all(d.given is made.decoders[0].given for d in made.decoders)


def test_all_ranks_draft_from_the_same(made: Made) -> None:
    drafter = Drafter(Drafting(Costs((1,) * 7), looks_up=False), [1], [7, 9], Archive())
    one = DraftingSequence(drafter.state, Draft((7,), "prediction", 0), [1], [5], 3)
    launch = DraftingLaunch((one,), 3)
    made.ranks.start_drafting([Query(0, 1, [5])], launch)
    assert [step for step, _ in made.log][::4] == ["prepare", "await", "go", "mark"]
    first = made.decoders[0].given
    assert isinstance(first, Given)
    assert (first.num_queries, first.most_rounds) == (2, 3)
    assert all(d.given is first and d.drafting is launch for d in made.decoders)
    assert all(d.kept is None for d in made.decoders)
    assert list(made.ranks.drafted_rounds()) == [[DraftedRound((7, 8), 1, 0)]]
    made.decoders[2].error, made.decoders[2].end = LaunchError("the decode kernel", "x"), "gone"
    with pytest.raises(LaunchError, match="rank 2 on GPU 0 reports gone"):
        list(made.ranks.drafted_rounds())


@pytest.mark.parametrize("first", [None, 9])
def test_what_all_ranks_made_ready_starts_everywhere_with_the_first_token(
    made: Made, first: int | None
) -> None:
    drafter = Drafter(Drafting(Costs((1,) * 7), looks_up=False), [1], [7, 9], Archive())
    one = DraftingSequence(drafter.state, Draft((7,), "prediction", 0), [1], [5], 3)
    launch = DraftingLaunch((one,), 3)
    if first is None:
        made.ranks.prepare_next_drafting(Query(0, 1, [5]), launch)
    else:
        made.ranks.prepare_next([Query(0, 1, [5])], 3)
    assert [step for step, _ in made.log if step != "pack"] == ["prepare"] * 4
    assert {d.awaits_first for d in made.decoders} == {first is not None}
    made.log.clear()
    made.ranks.start_next(first)
    assert [step for step, _ in made.log][::4] == [f"renew {first}", "await", "go", "mark"]
    assert len(made.log) == 16


def test_logits_come_together_by_token_id(made: Made) -> None:
    for rank, decoder in enumerate(made.decoders):
        own = Share(SMALL, RANKS, rank).vocabulary
        decoder.logits += torch.arange(own.start, own.start + ROWS)
    assert torch.equal(made.ranks.logits[3, :VOCAB], torch.arange(VOCAB).float())
    kept = torch.zeros(2, 1, PLAN.exchanges.sampled_rows)
    made.ranks.run([Query(0, 0, [1])], 2, logits=kept)
    assert torch.equal(kept[1, 0, :VOCAB], torch.arange(VOCAB).float())


def test_logits_of_a_round_come_together_on_the_host(made: Made) -> None:
    made.ranks.start([Query(0, 0, [1])], 2, keeps_logits=True)
    for rank, decoder in enumerate(made.decoders):
        assert decoder.kept is decoder.kept_logits
        own = Share(SMALL, RANKS, rank).vocabulary
        decoder.kept_logits[1, 3] = torch.arange(own.start, own.start + ROWS)
    assert torch.equal(made.ranks.logits_of(1, 3)[:VOCAB], torch.arange(VOCAB).float())


def stuck(missing: int) -> Fault:
    return Fault(4, 9, 1, 2, 3, 1, 2, 8, 8, 3, missing)


def test_a_stuck_rank_is_named_with_those_that_waited(made: Made) -> None:
    made.decoders[0].error = KernelStuck("here", "there", "nothing")
    for rank, decoder in enumerate(made.decoders):
        decoder.end, decoder.fault = "launch failure", stuck(0b0100)
        if rank == 2:
            decoder.fault = stuck(0b0100 | 0b0001)
    with pytest.raises(KernelStuck) as refused:
        made.ranks.run([Query(0, 0, [1])], 2)
    for told in (
        "rank 2 on GPU 0: block 4 on SM 9", "attention of all heads",
        "rank 0 on GPU 0 waited for rank 2", "rank 3 on GPU 0 waited for rank 2",
    ):  # fmt: skip
        assert told in refused.value.message


def test_a_failure_without_a_report_names_the_rank(made: Made) -> None:
    made.decoders[1].error = LaunchError("the decode kernel", "gone")
    made.decoders[1].end, made.decoders[3].end = "an uncorrectable error", None
    with pytest.raises(LaunchError) as refused:
        made.ranks.run([Query(0, 0, [1])], 2)
    assert "rank 1 on GPU 0 reports an uncorrectable error" in refused.value.message
    assert "rank 3 on GPU 0 goes on running" in refused.value.message
    assert "rank 2" not in refused.value.message


def test_a_rank_that_does_not_start_is_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def go(self: FakeDecoder) -> None:
        if self.rank == 3:
            raise LaunchError("launching kernel 'decode'", "CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(module.Decoder, "go", go)
    with pytest.raises(LaunchError, match=r"starting rank 3 on GPU 0.*CUDA_ERROR_LAUNCH_FAILED"):
        made.ranks.run([Query(0, 0, [1])], 2)
