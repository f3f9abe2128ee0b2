"""A model on the decode kernel: start launches, read tokens while they run."""

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soloist.errors import KernelStuck, LaunchError
from soloist.jit.module import Module
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.abi import (
    DRAFT_BUFFERS,
    DRAFT_START,
    DRAFTER,
    LAUNCH,
    MASKS,
    MOST_DRAFTING_SEQUENCES,
    SAMPLE_BUFFERS,
    params,
)
from soloist.megakernel.drafting import EMITTED_WORDS, DraftedRound, DraftingLaunch
from soloist.megakernel.fault import Fault
from soloist.megakernel.header import BUILT_FOR, Build
from soloist.megakernel.kernel import DecodeKernel, load_drafting
from soloist.megakernel.launch import LAUNCH_WORDS, Given, Query, pack, pack_drafting
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES, THREADS
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.sampler import KernelSampler
from soloist.megakernel.trace import num_words as num_trace_words
from soloist.megakernel.workspace import fresh_workspace
from soloist.model.torch_types import TORCH_DTYPES
from soloist.sampling.constraint import Words

_STRIDE_AT = LAUNCH.offsets["logits_round_stride"] // 4
# Words of 32 bits, between which a part of what is copied may begin: 16 bytes.
_ALIGNED_WORDS = 4


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A launch whose copies are queued.

    Attributes:
        module: the build that runs.
        params: the kernel's parameter.
        num_queries: of its first round.
        most_rounds: it has no more.
        drafting: of a launch that drafts.
    """

    module: Module
    params: "ctypes.Array[ctypes.c_uint8]"
    num_queries: int
    most_rounds: int
    drafting: DraftingLaunch | None


class Decoder:
    """A model's weights in the kernel's order, its KV pool, and the kernel, of one rank.

    Args:
        plan: what to build.
        weights: of the rank's share, on the pool's GPU.
        rope: [positions, D / 2, 2] cosine and sine, fp32.
        pool: KV pages of the rank's heads (`pool_kv_heads`), as the tensor of a `PagePool`.
        rank: which of the plan's ranks this is; see `Ranks` for launches of several.
        max_rounds: longest launch.
        cache: where compiled kernels are kept.
        build: which kernel; `load` takes another one.

    Attributes:
        prepares_while_running: the next launch may be made ready while one runs.
        kept_logits: [KEPT_ROUNDS, MAX_QUERIES, rows] fp32, for launches that keep the logits of
            all their rounds.
        logits: [MAX_QUERIES, rows], of the last round of other launches.
    """

    prepares_while_running = True

    def __init__(  # noqa: PLR0913 - sizes and builds that only tests and tools ask for
        self,
        plan: Plan,
        weights: PackedWeights,
        rope: Tensor,
        pool: Tensor,
        *,
        rank: int = 0,
        max_rounds: int = 4096,
        max_sequences: int = MAX_QUERIES,
        cache: Path | None = None,
        build: Build = Build(),  # noqa: B008 - frozen
    ) -> None:
        self.plan = plan
        device = pool.device
        self._device = device
        self.rope, self.pool, self.max_rounds = rope.contiguous(), pool, max_rounds
        self.rank = rank
        self.image, self.vectors = weights.image, weights.vectors
        self._embedding, self._experts = weights.embedding, weights.experts
        self._cache = cache
        self.load(build)
        self._fresh_workspaces = {n: fresh_workspace(plan, n).to(device) for n in BUILT_FOR}
        self._workspace = torch.empty_like(self._fresh_workspaces[MAX_QUERIES])
        self.peers = [self]  # decoders of all ranks
        words = num_trace_words(plan)
        rows = plan.grid_blocks + plan.attention_blocks
        self.trace = torch.zeros(rows, words, dtype=torch.int64, device=device)
        self.kept_logits = torch.zeros(
            KEPT_ROUNDS, MAX_QUERIES, plan.exchanges.logit_rows, dtype=torch.float32, device=device
        )
        self.logits = self.kept_logits[0]

        def pinned(*counts: int) -> Tensor:
            return torch.zeros(counts, dtype=torch.int32, pin_memory=True)

        pages = -(-rope.shape[0] // PAGE_POSITIONS)
        self._pages_on_host = pinned(max_sequences, pages)
        self.page_tables = torch.zeros(max_sequences, pages, dtype=torch.int32, device=device)

        # What a launch is given: a `LAUNCH`, then input tokens [query][round]. On the host twice,
        # used in turn: a launch is prepared while the copy for the last one may be still to come.
        most_words = LAUNCH_WORDS + MAX_QUERIES * max_rounds
        self._given_on_host = [pinned(most_words) for _ in range(2)]
        self._given = torch.zeros(most_words, dtype=torch.int32, device=device)

        self._emitted, self._signals = pinned(max_rounds * EMITTED_WORDS), pinned(64)
        self._progress, self._yield_requested, self._fault = (
            self._signals[0:1], self._signals[16:17], self._signals[32:48]
        )  # fmt: skip
        emitted = self._emitted.numpy().view(np.uint32)
        self._shown = emitted[: max_rounds * MAX_QUERIES].reshape(max_rounds, MAX_QUERIES)
        self._shown_drafted = emitted.reshape(max_rounds, EMITTED_WORDS)
        # Of the last launch that drafts.
        self._texts = torch.empty(0, dtype=torch.int32, device=device)
        self._texts_on_host = pinned(0)
        self._signal_values = self._signals.numpy()
        self._stream = torch.cuda.Stream(device)
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._embedding_scale = self._measure_embedding()
        self._prepared: _Prepared | None = None
        self._launched_drafting: DraftingLaunch | None = None
        self._parameters: dict[bool, NDArray[np.void]] = {}

    def load(self, build: Build) -> None:
        """Take another build of the kernel, on the same weights; no launch may be running.

        Args:
            build: for any number of queries; the one for a single query is loaded beside it.
        """
        self._build_as = build
        for loaded in ("_sampler", "_drafting"):
            self.__dict__.pop(loaded, None)
        self._kernel = DecodeKernel.load(self.plan, build, self._device, self._cache)

    @cached_property
    def _sampler(self) -> KernelSampler:
        build = replace(self._build_as, samples=True)
        kernel = DecodeKernel.load(self.plan, build, self._device, self._cache)
        return KernelSampler(self.plan, kernel, self._device)

    @cached_property
    def _drafting(self) -> tuple[Module, ...]:
        return load_drafting(self.plan, self._build_as, self._device, self._cache)

    def prepare_sampling(self) -> None:
        """Build and allocate now what the first launch with a `Choice` would wait for."""
        _ = self._sampler

    def prepare_drafting(self) -> None:
        """Build now what the first launches that draft would wait for."""
        _ = self._drafting

    def _measure_embedding(self) -> float:
        table = self._embedding
        if table is None:
            head = self.image[: self.plan.blocks, self.plan.image.head_offset :]
            table = head.view(TORCH_DTYPES[self.plan.dtype])
        chunks = torch.split(table, max(1, (1 << 26) // table.shape[1]))
        # Multiplied: the library's kernel for powers is large, and is loaded when first used.
        squares = math.fsum((x * x).sum().item() for x in map(Tensor.float, chunks))
        return float((squares / (self.plan.model.vocab_size * self.plan.model.hidden_size)) ** -0.5)

    def start(
        self,
        queries: Sequence[Query],
        rounds: int,
        *,
        logits: Tensor | None = None,
        keeps_logits: bool = False,
    ) -> None:
        """Start a launch of at most `rounds` rounds; it ends early when a query stops.

        For a plan of one rank. Where a query has a `Choice`, the kernel that samples runs, and its
        launch also ends where a query's best score is not finite.

        Args:
            queries: 1 … 8; queries of one sequence lie side by side with rising positions.
            rounds: 1 … max_rounds.
            logits: [rounds, queries, rows] fp32 to keep the logits of every round.
            keeps_logits: the same in `kept_logits`, for `logits_of`; of at most KEPT_ROUNDS.
        """
        assert self.plan.ranks == 1, "ranks start together"
        self.prepare(self.pack(queries, rounds), self.kept_logits if keeps_logits else logits)
        self.go()
        self.mark_end()

    def prepare_next(self, queries: Sequence[Query], rounds: int) -> None:
        """Make ready what may follow the launch that runs; `start` may follow it just as well.

        All that the host has to do is done while that launch runs, but for `start_next`.
        Arguments as of `start`; no query has a mask.
        """
        assert self.plan.ranks == 1, "ranks are prepared together"
        self.prepare(self.pack(queries, rounds), awaits_first=len(queries) == 1)

    def prepare_next_drafting(self, query: Query, launch: DraftingLaunch) -> None:
        """The same for a launch that drafts, while none does, of one sequence."""
        assert self.plan.ranks == 1, "ranks are prepared together"
        given = pack_drafting([query], launch, self.plan.model.vocab_size)
        self.prepare(given, drafting=launch)

    def start_next(self, first: int | None = None) -> None:
        """Start what was made ready; the launch before it has told all its tokens.

        Args:
            first: the only query's first input token, in place of the one that was prepared, which
                a launch that drafts keeps. The GPU was asked for nothing since that the launch
                depends on.
        """
        self.renew(first)
        self.go()
        self.mark_end()

    def renew(self, first: int | None) -> None:
        """Give what was prepared its first token, or have it wait for what the GPU does by now."""
        if first is not None:
            self._given_on_host[0].numpy()[LAUNCH_WORDS] = first
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self.plan.ranks > 1:
            with torch.cuda.device(self._device):
                self._ready.record(self._stream)

    def start_drafting(
        self, queries: Sequence[Query], launch: DraftingLaunch, *, keeps_logits: bool = False
    ) -> None:
        """Start a launch that drafts after each round what the next one checks.

        For a plan of one rank.

        Args:
            queries: the latest token of each sequence. No choice has a mask.
            launch: texts, first drafts, and most tokens; at most `max_rounds`.
            keeps_logits: as of `start`.
        """
        assert self.plan.ranks == 1, "ranks start together"
        given = pack_drafting(queries, launch, self.plan.model.vocab_size)
        self.prepare(given, self.kept_logits if keeps_logits else None, launch)
        self.go()
        self.mark_end()

    def pack(self, queries: Sequence[Query], rounds: int) -> Given:
        """What a launch is given; arguments as of `start`."""
        assert 1 <= rounds <= self.max_rounds, f"{rounds} rounds"
        return pack(queries, rounds, self.plan.model.vocab_size)

    def prepare(
        self,
        given: Given,
        logits: Tensor | None = None,
        drafting: DraftingLaunch | None = None,
        *,
        awaits_first: bool = False,
    ) -> None:
        """Queue the copies of what a launch reads.

        Args:
            given: what it is given.
            logits: [rounds, queries, rows] fp32 for those of every round.
            drafting: of a launch that drafts, which `given` was packed for; of at most
                `max_rounds`.
            awaits_first: `renew` may give it another first token.

        No rank may start before all are prepared: ranks write to each other. A launch that runs
        on this one has its copies behind it, in the same stream.
        """
        assert given.most_rounds <= self.max_rounds, "rounds"
        assert logits is None or given.most_rounds <= len(logits), "rounds whose logits are kept"
        self._given_on_host.reverse()
        count, given_on_host = len(given.words), self._given_on_host[0]
        words = given_on_host.numpy()
        words[:count] = given.words
        if logits is not None:
            stride = np.array([logits.stride(0)], np.uint64)
            words[_STRIDE_AT : _STRIDE_AT + 2] = stride.view(np.int32)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._given[:count].copy_(given_on_host[:count], non_blocking=True)
            is_single = given.num_queries == 1 and drafting is None
            built_for = 1 if is_single else MAX_QUERIES
            self._workspace.copy_(self._fresh_workspaces[built_for])
            kernel, record = self._kernel, self._parameter(drafts=drafting is not None)
            if given.choices is not None:
                sampler, first = self._sampler, self.peers[0]._sampler  # noqa: SLF001 - same class
                kernel, record["sample"] = sampler.kernel, sampler.upload(given.choices)
                if sampler is first:
                    sampler.begin(given.choices.masks, given.num_given)
                record["masks"] = first.where_masks_are
            if logits is not None:
                record["logits"] = logits.data_ptr()
            if awaits_first:
                # The kernel reads it where the host writes it: a copy would take longer to queue.
                record["forced"] = given_on_host[LAUNCH_WORDS:].data_ptr()
            if drafting is not None:
                record["draft"] = self._upload_texts(drafting)
            if self.plan.ranks > 1:
                self._ready.record(stream)
        if drafting is None:
            module = kernel.module_for(given.num_queries)
        else:
            module = self._drafting[given.choices is not None]
        parameters = (ctypes.c_uint8 * record.nbytes).from_buffer_copy(record.tobytes())
        self._prepared = _Prepared(
            module, parameters, given.num_queries, given.most_rounds, drafting
        )

    def _parameter(self, *, drafts: bool) -> NDArray[np.void]:
        """The kernel's parameter, but for what a launch alone has: that is zero."""
        if drafts not in self._parameters:
            # Packed once: it takes as long as all the rest of a launch.
            more: dict[str, Any] = {}
            if drafts:
                more["draft"] = np.zeros((), DRAFT_BUFFERS.dtype)
            if self._experts is not None:
                more["experts"] = self._experts.data_ptr()
            struct = params(self.plan.ranks, drafts=drafts, experts=self.plan.has_experts)
            self._parameters[drafts] = struct.record(
                image=self.image.data_ptr(),
                vectors=self.vectors.data_ptr(),
                embedding=0 if self._embedding is None else self._embedding.data_ptr(),
                pool=self.pool.data_ptr(),
                page_tables=self.page_tables.data_ptr(),
                rope=self.rope.data_ptr(),
                workspace=self.workspace_address,
                logits=self.logits.data_ptr(),
                forced=self._given[LAUNCH_WORDS:].data_ptr(),
                launch=self._given.data_ptr(),
                emitted=self._emitted.data_ptr(),
                progress=self._progress.data_ptr(),
                yield_requested=self._yield_requested.data_ptr(),
                fault=self._fault.data_ptr(),
                trace=self.trace.data_ptr(),
                page_values=self.pool.stride(0) * self.pool.element_size() // 2,
                page_table_stride=self.page_tables.shape[1],
                embedding_scale=self._embedding_scale,
                sample=np.zeros((), SAMPLE_BUFFERS.dtype),
                rank=self.rank,
                peers=[peer.workspace_address for peer in self.peers],
                masks=np.zeros((), MASKS.dtype),
                **more,
            )
        return self._parameters[drafts].copy()

    def _upload_texts(self, launch: DraftingLaunch) -> NDArray[np.void]:
        """Where a launch that drafts has its texts, as `DRAFT_BUFFERS`: all come in one copy."""
        sequences, end = launch.sequences, 0

        def place(num_words: int) -> int:
            nonlocal end
            begin = -(-end // _ALIGNED_WORDS) * _ALIGNED_WORDS
            end = begin + num_words
            return begin

        num_records = 4 * len(sequences) * self.plan.grid_blocks
        records_at = place(num_records)
        starts_at = place(len(sequences) * DRAFT_START.num_bytes // 4)
        texts, places = [one.texts for one in sequences], list[dict[str, int]]()
        for of_one, one in zip(texts, sequences, strict=True):
            room = {"history": one.most_tokens + MAX_QUERIES}
            places.append({name: place(len(x) + room.get(name, 0)) for name, x in of_one.items()})
        # Others than the first sequence have state of each block behind the texts.
        others = MOST_DRAFTING_SEQUENCES - 1 if len(sequences) > 1 else 0
        given_words, drafters_at = (
            end,
            place(self.plan.grid_blocks * others * DRAFTER.num_bytes // 4),
        )
        if end > len(self._texts):
            count = max(2 * end, self.max_rounds)
            # No launch that drafts is running.
            self._texts_on_host = torch.zeros(count, dtype=torch.int32, pin_memory=True)
            self._texts = torch.empty(count, dtype=torch.int32, device=self._device)
        words, at = self._texts_on_host.numpy(), self._texts.data_ptr()
        words[records_at : records_at + num_records] = 0
        for of_one, where in zip(texts, places, strict=True):
            for name, ids in of_one.items():
                words[where[name] : where[name] + len(ids)] = ids
        starts = [
            one.start(column, {name: at + 4 * begin for name, begin in where.items()})
            for one, column, where in zip(sequences, launch.columns, places, strict=False)
        ]
        given = np.frombuffer(b"".join(start.tobytes() for start in starts), np.int32)
        words[starts_at : starts_at + len(given)] = given
        self._texts[:given_words].copy_(self._texts_on_host[:given_words], non_blocking=True)
        return DRAFT_BUFFERS.record(
            starts=at + 4 * starts_at,
            records=at + 4 * records_at,
            drafters=at + 4 * drafters_at,
            num_sequences=len(sequences),
            most_beside=launch.most_beside,
        )

    def await_copies(self) -> None:
        """Return once what was prepared is in the GPU's memory, of a plan of several ranks."""
        self._ready.synchronize()

    def go(self) -> None:
        """Start what was prepared, once it is so on all ranks; then `mark_end`."""
        assert self._prepared is not None, "it was prepared"
        prepared, self._prepared = self._prepared, None
        self._queries, self._most_rounds = prepared.num_queries, prepared.most_rounds
        self._launched_drafting = prepared.drafting
        self._signal_values[:] = 0
        drafts = prepared.drafting is not None
        blocks = self.plan.grid_blocks + self.plan.attending(prepared.num_queries, drafts=drafts)
        prepared.module.launch(
            blocks, THREADS, self._kernel.shared_bytes, [prepared.params],
            self._stream.cuda_stream, cooperative=self._is_alone,
        )  # fmt: skip

    def mark_end(self) -> None:
        """Have the GPU tell when the launch has ended.

        Streams of one GPU may share a queue, where nothing passes what waits for an end: so ranks
        mark only after all of them have started.
        """
        with torch.cuda.device(self._device):
            self._done.record(self._stream)

    @property
    def _is_alone(self) -> bool:
        """No other rank shares the GPU: the driver runs cooperative kernels one after the other."""
        return [peer.pool.device for peer in self.peers].count(self._device) == 1

    @property
    def workspace_address(self) -> int:
        """Where other ranks store their data for this one."""
        return self._workspace.data_ptr()

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens, one list (a token for each query) a round, as they come.

        A query without a finite best score has a word of `NO_TOKEN` (sampling_header.py) instead.

        Raises:
            KernelStuck: a wait inside the kernel lasted too long.
            LaunchError: the kernel failed.
        """
        for number in self._rounds():
            yield self._shown[number, : self._queries].tolist()

    def drafted_rounds(self) -> Iterator[list[DraftedRound]]:
        """The same of a launch that drafts, by sequence; each round makes a token, or several.

        Where the next round may make all tokens that are left, the host waits for the launch's end:
        at most eight tokens come at once then.
        """
        launch = self._launched_drafting
        assert launch is not None, "it drafts"
        left = [one.most_tokens for one in launch.sequences]
        for number in self._rounds():
            made = DraftedRound.of_words(self._shown_drafted[number].tolist(), len(left))
            left = [most - len(one.tokens) for most, one in zip(left, made, strict=True)]
            if min(left) <= MAX_QUERIES:
                self._most_rounds = min(self._most_rounds, number + 2)
            yield made

    def logits_of(self, number: int, column: int) -> Tensor:
        """[at least V] of a round of a launch that keeps them, once it ended or told the next one.

        What blocks have stored is in memory once they have met in the next round.
        """
        return self.kept_logits[number, column]

    def _rounds(self) -> Iterator[int]:
        """The launch's rounds, as they come."""
        seen = 0
        while True:
            done = self._finished()
            ready = int(self._signal_values[0])
            while seen < ready:
                yield seen
                seen += 1
            if done:
                return
            if ready == seen:
                self._pause(seen)

    def _pause(self, seen: int) -> None:
        """Let other threads run until there may be something new of a launch.

        The shortest sleep takes the system some 60 µs. It is too long where the GPU may stand
        still until the host has looked: before the last round, which often ends what came before.
        """
        if seen + 1 < self._most_rounds:
            time.sleep(0)
        else:
            with suppress(RuntimeError):  # `ending` says what it is
                self._done.synchronize()

    def _finished(self) -> bool:
        reason = self.ending()
        if reason:
            fault = self.fault
            if fault is not None:
                raise KernelStuck(fault.where, fault.needs, fault.seen)
            raise LaunchError("the decode kernel", reason)
        return reason is not None

    def ending(self) -> str | None:
        """None while the launch runs, why it failed, or nothing where it ended as it should."""
        try:
            return "" if self._done.query() else None
        except RuntimeError as error:
            return str(error).splitlines()[0]

    @property
    def fault(self) -> Fault | None:
        """What the launch's watchdog reported."""
        return Fault.of_words(self._signal_values[32:48].tolist())

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        """The first pages of a sequence, for launches that follow; none may be running.

        The host waits for no GPU: the copy has its place among those of launches.
        """
        on_host = self._pages_on_host[sequence, : len(pages)]
        on_host.numpy()[:] = pages
        with torch.cuda.stream(self._stream):
            self.page_tables[sequence, : len(pages)].copy_(on_host, non_blocking=True)

    def stop(self) -> None:
        """Ask the running launch to end at its next round."""
        self._signal_values[16] = 1

    def allow(self, query: int, words: Words | None) -> None:
        """Say what a query of the running launch may choose next.

        The kernel waits for it in every round of a query that began with a mask
        (`Choice.allowed`). Call it once for each of the query's tokens; calls after None, and
        for other queries, change nothing.

        Args:
            query: of the launch.
            words: bits [ceil(V / 32)] of the tokens; None ends the launch with the round that
                waits, in which the query's token means nothing.
        """
        if "_sampler" in self.__dict__:
            self._sampler.allow(query, words)

    def abandon(self) -> None:
        """`stop`, and let nobody wait for masks: tokens that still come mean nothing."""
        self.stop()
        if "_sampler" in self.__dict__:
            self._sampler.abandon()

    def run(
        self, queries: Sequence[Query], rounds: int, *, logits: Tensor | None = None
    ) -> list[list[int]]:
        """`start`, then all of its tokens."""
        self.start(queries, rounds, logits=logits)
        return list(self.tokens())
