"""Launches of several ranks: prepared everywhere, then started everywhere, then read from one."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from soloist.errors import DeviceError, KernelStuck, LaunchError
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch
from soloist.megakernel.fault import RanksFault
from soloist.megakernel.header import Build
from soloist.megakernel.launch import Query, pack_drafting
from soloist.megakernel.limits import MAX_QUERIES
from soloist.parallel.peers import allow_access
from soloist.sampling.constraint import Words

# After one rank has failed: for the others' watchdogs to report, and longer than they take.
_REPORTS_S = 6.0

_Told = TypeVar("_Told")


class Ranks:
    """The decoders of a plan's ranks, each on a GPU of its own or with SMs of its own.

    To those who start launches it is what a `Decoder` is.

    Args:
        decoders: one for each rank, in order.

    Attributes:
        prepares_while_running: never, since ranks write to each other until all have ended.

    Raises:
        LaunchError: ranks share a GPU and do not fit it at once: their plan is for too many SMs.
        NoPeerAccess: GPUs cannot reach each other's memory.
    """

    prepares_while_running = False

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self.plan = decoders[0].plan
        assert [d.rank for d in decoders] == list(range(self.plan.ranks)), "every rank"
        self.decoders = list(decoders)
        self._devices = [d.pool.device.index or 0 for d in decoders]
        for device in set(self._devices):
            blocks = self.plan.grid_blocks + self.plan.attention_blocks
            _require_fit(device, self._devices.count(device) * blocks)
        allow_access(sorted(set(self._devices)))
        for decoder in self.decoders:
            decoder.peers = self.decoders
        self.max_rounds = min(d.max_rounds for d in decoders)
        self._kept: tuple[list[Tensor], Tensor] | None = None

    @property
    def page_tables(self) -> Tensor:
        """[sequences, pages] int32, to be read; `write_pages` changes them."""
        return self.decoders[0].page_tables

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        """The first pages of a sequence, in every rank's pool; no launch may be running."""
        for decoder in self.decoders:
            decoder.write_pages(sequence, pages)

    @property
    def logits(self) -> Tensor:
        """[8, at least V] of the last round, fetched from all ranks to the first one's GPU."""
        out = torch.empty(
            MAX_QUERIES, self.plan.exchanges.sampled_rows, device=self.decoders[0].pool.device
        )
        self._gather([d.logits for d in self.decoders], out)
        return out

    @property
    def trace(self) -> Tensor:
        """Of the first rank, as of `Decoder`."""
        return self.decoders[0].trace

    def load(self, build: Build) -> None:
        """Take another build of the kernel on all ranks; no launch may be running."""
        for decoder in self.decoders:
            decoder.load(build)

    def prepare_sampling(self) -> None:
        """Build and allocate now what the first launch with a `Choice` would wait for."""
        for decoder in self.decoders:
            decoder.prepare_sampling()

    def prepare_drafting(self) -> None:
        """Build now what the first launches that draft would wait for."""
        for decoder in self.decoders:
            decoder.prepare_drafting()

    def start(
        self,
        queries: Sequence[Query],
        rounds: int,
        *,
        logits: Tensor | None = None,
        keeps_logits: bool = False,
    ) -> None:
        """Start a launch; arguments as of `Decoder.start`.

        Args:
            queries: the same for all ranks.
            rounds: 1 … max_rounds.
            logits: [rounds, queries, at least V], filled once the launch has ended.
            keeps_logits: as of `Decoder.start`.
        """
        given = self.decoders[0].pack(queries, rounds)
        self._kept = None
        if logits is not None:
            rows = self.decoders[0].logits.shape[1]
            parts = [
                torch.zeros(rounds, len(queries), rows, device=d.pool.device) for d in self.decoders
            ]
            self._kept = (parts, logits)
        for rank, decoder in enumerate(self.decoders):
            kept = None if self._kept is None else self._kept[0][rank]
            decoder.prepare(given, decoder.kept_logits if keeps_logits else kept)
        self._go()

    def start_drafting(
        self, queries: Sequence[Query], launch: DraftingLaunch, *, keeps_logits: bool = False
    ) -> None:
        """Start a launch that drafts; arguments as of `Decoder.start_drafting`.

        Each rank drafts for itself, from texts and choices that are the same everywhere.
        """
        self._prepare_drafting(queries, launch, keeps_logits=keeps_logits)
        self._go()

    def prepare_next(self, queries: Sequence[Query], rounds: int) -> None:
        """Make ready what may follow, as `Decoder` does, while no launch is running."""
        given = self.decoders[0].pack(queries, rounds)
        self._kept = None
        for decoder in self.decoders:
            decoder.prepare(given, awaits_first=len(queries) == 1)

    def prepare_next_drafting(self, query: Query, launch: DraftingLaunch) -> None:
        """The same for a launch that drafts, of one sequence."""
        self._prepare_drafting([query], launch, keeps_logits=False)

    def _prepare_drafting(
        self, queries: Sequence[Query], launch: DraftingLaunch, *, keeps_logits: bool
    ) -> None:
        given = pack_drafting(queries, launch, self.plan.model.vocab_size)
        self._kept = None
        for decoder in self.decoders:
            decoder.prepare(given, decoder.kept_logits if keeps_logits else None, launch)

    def start_next(self, first: int | None = None) -> None:
        """Start what was made ready; arguments as of `Decoder.start_next`."""
        for decoder in self.decoders:
            decoder.renew(first)
        self._go()

    def _go(self) -> None:
        """Start on all ranks what was prepared."""
        for step in (Decoder.await_copies, Decoder.go, Decoder.mark_end):
            for rank, decoder in enumerate(self.decoders):
                try:
                    step(decoder)
                except (LaunchError, RuntimeError) as error:
                    what = f"starting rank {rank} on GPU {self._devices[rank]}"
                    raise LaunchError(what, str(error).splitlines()[0]) from error

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens, which all ranks choose alike; ends when all have ended.

        Raises:
            KernelStuck: a wait inside a kernel lasted too long; it names who waited for whom.
            LaunchError: a kernel failed; it names the rank.
        """
        yield from self._of_all([d.tokens() for d in self.decoders])
        if self._kept is not None:
            self._gather(*self._kept)

    def drafted_rounds(self) -> Iterator[list[DraftedRound]]:
        """The same of a launch that drafts; see `Decoder.drafted_rounds`."""
        yield from self._of_all([d.drafted_rounds() for d in self.decoders])

    def logits_of(self, number: int, column: int) -> Tensor:
        """[at least V] of a round, on the host; as of `Decoder`."""
        out = torch.empty(self.plan.exchanges.sampled_rows)
        self._gather([d.kept_logits[number, column] for d in self.decoders], out)
        return out

    def _of_all(self, told: Sequence[Iterator[_Told]]) -> Iterator[_Told]:
        """What the first rank tells of a launch; ends when all ranks have ended."""
        first, *others = told
        try:
            yield from first
            for other in others:
                for _ in other:
                    pass
        except DeviceError as error:
            raise self._failure() from error

    def _gather(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Every rank's rows of the vocabulary [..., rows] to their places in `out` [..., V]."""
        for rank, part in enumerate(parts):
            own = self.plan.part_of(rank).vocabulary
            out[..., own.start : own.stop].copy_(part[..., : len(own)])

    def _failure(self) -> DeviceError:
        """What all ranks report of a launch that failed, as soon as they have ended."""
        deadline = time.monotonic() + _REPORTS_S
        endings = [d.ending() for d in self.decoders]
        while None in endings and time.monotonic() < deadline:
            time.sleep(0.01)
            endings = [d.ending() for d in self.decoders]
        faults = {d.rank: d.fault for d in self.decoders}
        if any(fault is not None for fault in faults.values()):
            found = RanksFault(faults, self._devices)
            return KernelStuck(found.where, found.needs, found.seen)
        reports = [
            f"rank {rank} on GPU {self._devices[rank]} "
            + ("goes on running" if ending is None else f"reports {ending}")
            for rank, ending in enumerate(endings)
            if ending != ""
        ]
        return LaunchError("the decode kernel", "; ".join(reports))

    def stop(self) -> None:
        """Ask the running launch to end at its next round."""
        self.decoders[0].stop()

    def allow(self, query: int, words: Words | None) -> None:
        """As of `Decoder`; the first rank passes it on."""
        self.decoders[0].allow(query, words)

    def abandon(self) -> None:
        """As of `Decoder`."""
        self.decoders[0].abandon()

    def run(
        self, queries: Sequence[Query], rounds: int, *, logits: Tensor | None = None
    ) -> list[list[int]]:
        """`start`, then all tokens."""
        self.start(queries, rounds, logits=logits)
        return list(self.tokens())


# What starts launches, of one rank or several.
Launcher = Decoder | Ranks


def _require_fit(device: int, blocks: int) -> None:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if blocks > num_sms:
        raise LaunchError(
            f"ranks that share GPU {device}",
            f"they have {blocks} blocks, which have to run at once, and it has {num_sms} SMs",
            "plan for a part of the SMs each",
        )
