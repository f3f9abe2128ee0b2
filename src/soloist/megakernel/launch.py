"""The decode kernel on a GPU: build it once, start launches, read tokens while they run."""

import ctypes
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soloist.errors import KernelStuck, LaunchError
from soloist.jit.cache import load_or_build
from soloist.jit.compiler import Cubin
from soloist.jit.module import Module
from soloist.jit.source import Source
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.abi import LAUNCH, MASKS, MAX_STOPS, QUERY_START, SAMPLE_BUFFERS, params
from soloist.megakernel.choice import Choice, PackedChoices, pack_choices
from soloist.megakernel.fault import Fault
from soloist.megakernel.header import BUILT_FOR, MASK_READY_WORDS, Build, header
from soloist.megakernel.limits import EXCHANGE_COPIES, MAX_QUERIES, THREADS
from soloist.megakernel.packed_weights import PackedWeights
from soloist.megakernel.plan import Plan
from soloist.megakernel.sampling_header import MASK_END, sample_workspace_bytes
from soloist.megakernel.trace import num_words as num_trace_words
from soloist.model.torch_types import TORCH_DTYPES
from soloist.sampling.constraint import Words, num_words

# Input tokens begin in a cache line of their own.
_LAUNCH_WORDS = -(-LAUNCH.num_bytes // 64) * 16
_STRIDE_AT = LAUNCH.offsets["logits_round_stride"] // 4


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
        words: a `LAUNCH`, then input tokens [query][round].
        num_queries: 1 … 8.
        num_given: by query, rounds whose input tokens are given.
        choices: None where every query takes its largest logit.
    """

    words: NDArray[np.int32]
    num_queries: int
    num_given: list[int]
    choices: PackedChoices | None


@dataclass(frozen=True, slots=True)
class _Modules:
    """Two builds of the kernel, for launches of one query and of more."""

    single: Module
    several: Module


class _Sampler:
    """The kernels that sample, and their buffers in GPU memory."""

    def __init__(self, plan: Plan, modules: _Modules, device: torch.device) -> None:
        rows = plan.exchanges.sampled_rows
        self.modules = modules
        self._seen = torch.zeros(MAX_QUERIES, rows, dtype=torch.int32, device=device)
        self._adjusted = torch.zeros(MAX_QUERIES, rows, dtype=torch.float32, device=device)
        workspace_bytes = sample_workspace_bytes(plan.grid_blocks)
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._lists = (torch.empty(0), torch.empty(0))
        words = num_words(plan.model.vocab_size)
        # Two are used alternately where other ranks may still read one after the first rank has
        # shown its token.
        self._copies = 1 if plan.ranks == 1 else 2
        self.masks = torch.zeros(
            self._copies, MAX_QUERIES, words, dtype=torch.int32, pin_memory=True
        )
        self.ready = torch.zeros(MAX_QUERIES, MASK_READY_WORDS, dtype=torch.int32, pin_memory=True)
        self._mask_words = self.masks.numpy().view(np.uint32)
        self._ready_words = self.ready.numpy().view(np.uint32)
        self._allowed: dict[int, int] = {}  # by masked query, the latest round with a mask

    def begin(self, masks: dict[int, Words], num_given: Sequence[int]) -> None:
        """Forget the last launch's masks; give what each query's first choice may take.

        Args:
            masks: by query.
            num_given: by query, rounds whose input tokens are given: before, it chooses nothing.
        """
        self._allowed = {query: num_given[query] - 1 for query in masks}
        for query, words in masks.items():
            self.allow(query, words)

    def allow(self, query: int, words: Words | None) -> None:
        """See Decoder."""
        if query not in self._allowed:
            return
        if words is None:
            del self._allowed[query]
            last = MASK_END
        else:
            last = self._allowed[query] = self._allowed[query] + 1
            self._mask_words[last % self._copies, query] = words
        # After the words: x86 keeps stores in order. Pairs with `wait_for_masks` in choose.cuh.
        self._ready_words[query, 0] = last

    def abandon(self) -> None:
        """No masked query gets a mask any more."""
        for query in list(self._allowed):
            self.allow(query, None)

    def upload(self, packed: PackedChoices) -> NDArray[np.void]:
        """Make the buffers ready for a launch; return where they are, as `SAMPLE_BUFFERS`."""
        device = self._seen.device
        self._workspace.zero_()
        for query, words in packed.seen.items():
            self._seen[query, : len(words)].copy_(torch.from_numpy(words.view(np.int32)))
        # Kept until the next launch: this one reads them.
        self._lists = (
            torch.from_numpy(packed.list_ids.view(np.int32)).to(device),
            torch.from_numpy(packed.list_values).to(device),
        )
        list_ids, list_values = self._lists
        return SAMPLE_BUFFERS.record(
            seen=self._seen.data_ptr(),
            adjusted=self._adjusted.data_ptr(),
            workspace=self._workspace.data_ptr(),
            list_ids=list_ids.data_ptr(),
            list_values=list_values.data_ptr(),
        )

    @property
    def where_masks_are(self) -> NDArray[np.void]:
        """As `MASKS`."""
        return MASKS.record(words=self.masks.data_ptr(), ready=self.ready.data_ptr())


class Decoder:
    """A model's weights in the kernel's order, its KV pool, and the kernel, of one rank.

    Args:
        plan: what to build.
        weights: of the rank's share, on the pool's GPU.
        rope: [positions, D / 2, 2] cosine and sine, fp32.
        pool: KV pages [pages, layers, K, 2, 2, 32 · D], of the rank's heads (`pool_kv_heads`).
        rank: which of the plan's ranks this is; see `Ranks` for launches of several.
        max_rounds: longest launch.
        cache: where compiled kernels are kept.
        build: which kernel; `load` takes another one.
    """

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
        self._embedding = weights.embedding
        self._cache = cache
        self.load(build)
        self._fresh_workspaces = {n: _fresh_workspace(plan, n).to(device) for n in BUILT_FOR}
        self._workspace = torch.empty_like(self._fresh_workspaces[MAX_QUERIES])
        self.peers = [self]  # decoders of all ranks
        words = num_trace_words(plan)
        self.trace = torch.zeros(plan.grid_blocks, words, dtype=torch.int64, device=device)
        self.logits = torch.zeros(
            MAX_QUERIES, plan.exchanges.logit_rows, dtype=torch.float32, device=device
        )
        pages = -(-rope.shape[0] // PAGE_POSITIONS)
        self.page_tables = torch.zeros(max_sequences, pages, dtype=torch.int32, device=device)

        def pinned(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, pin_memory=True)

        # What a launch is given: a `LAUNCH`, then input tokens [query][round].
        self._given_on_host = pinned(_LAUNCH_WORDS + MAX_QUERIES * max_rounds)
        self._given = torch.zeros_like(self._given_on_host, device=device)

        self._emitted, self._signals = pinned(max_rounds * MAX_QUERIES), pinned(64)
        self._progress, self._yield_requested, self._fault = (
            self._signals[0:1], self._signals[16:17], self._signals[32:48]
        )  # fmt: skip
        self._shown = self._emitted.numpy().view(np.uint32).reshape(max_rounds, MAX_QUERIES)
        self._signal_values = self._signals.numpy()
        self._stream = torch.cuda.Stream(device)
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._embedding_scale = self._measure_embedding()

    def load(self, build: Build) -> None:
        """Take another build of the kernel, on the same weights; no launch may be running.

        Args:
            build: for any number of queries; the one for a single query is loaded beside it.
        """
        self._build_as = build
        self.__dict__.pop("_sampler", None)
        self._modules = self._loaded(build)

    @cached_property
    def _sampler(self) -> _Sampler:
        modules = self._loaded(replace(self._build_as, samples=True))
        return _Sampler(self.plan, modules, self._device)

    @cached_property
    def _shared_bytes(self) -> int:
        """Dynamic shared memory of a block: what the build that takes more of it needs."""
        return max(
            self.plan.with_room_for(queries, samples=samples).shared.num_bytes
            for queries in BUILT_FOR
            for samples in (False, True)
        )

    def _loaded(self, build: Build) -> _Modules:
        builds = [replace(build, queries=queries) for queries in BUILT_FOR]
        with ThreadPoolExecutor(len(builds), "soloist-compile") as pool:
            cubins = list(pool.map(self._built, builds))
        with torch.cuda.device(self._device):  # a module belongs to the context it is loaded in
            modules = _Modules(*(Module(cubin, "decode") for cubin in cubins))
        # Now, since it may wait for all that runs on the GPU: another rank's kernel, say.
        for module in (modules.single, modules.several):
            module.make_ready(self._shared_bytes)
        return modules

    def _built(self, build: Build) -> Cubin:
        source = Source("kernels/decode.cu", header(self.plan, build))
        return load_or_build(source, self.plan.gpu.arch, self._cache)

    def prepare_sampling(self) -> None:
        """Build and allocate now what the first launch with a `Choice` would wait for."""
        _ = self._sampler

    def _measure_embedding(self) -> float:
        table = self._embedding
        if table is None:
            head = self.image[: self.plan.blocks, self.plan.image.head_offset :]
            table = head.view(TORCH_DTYPES[self.plan.dtype])
        chunks = torch.split(table, max(1, (1 << 26) // table.shape[1]))
        # Multiplied: the library's kernel for powers is large, and is loaded when first used.
        squares = math.fsum((x * x).sum().item() for x in map(Tensor.float, chunks))
        return float((squares / (self.plan.model.vocab_size * self.plan.model.hidden_size)) ** -0.5)

    def start(self, queries: Sequence[Query], rounds: int, *, logits: Tensor | None = None) -> None:
        """Start a launch of at most `rounds` rounds; it ends early when a query stops.

        For a plan of one rank. Where a query has a `Choice`, the kernel that samples runs, and its
        launch also ends where a query's best score is not finite.

        Args:
            queries: 1 … 8; queries of one sequence lie side by side with rising positions.
            rounds: 1 … max_rounds.
            logits: [rounds, queries, rows] fp32 to keep the logits of every round.
        """
        assert self.plan.ranks == 1, "ranks start together"
        self.prepare(self.pack(queries, rounds), logits)
        self.go()
        self.mark_end()

    def pack(self, queries: Sequence[Query], rounds: int) -> Given:
        """What a launch is given; arguments as of `start`."""
        assert 1 <= len(queries) <= MAX_QUERIES, f"{len(queries)} queries"
        assert 1 <= rounds <= self.max_rounds, f"{rounds} rounds"
        launch = np.zeros((), LAUNCH.dtype)
        launch["queries"], launch["rounds"] = len(queries), rounds
        packed = self._packed_choices(queries)
        if packed is not None:
            launch["sampling"], launch["step"] = packed.params, packed.steps
        forced = np.zeros((len(queries), rounds), np.int32)
        for i, c in enumerate(queries):
            given = list(c.tokens)[:rounds]
            forced[i, : len(given)] = given
            launch["query"][i] = QUERY_START.record(
                sequence=c.sequence,
                position=c.position,
                stride=c.stride,
                forced=len(given),
                num_stops=len(c.stops),
                keep=c.keep,
                stops=[*c.stops, *[0] * (MAX_STOPS - len(c.stops))],
            )
        words = np.zeros(_LAUNCH_WORDS + forced.size, np.int32)
        words[: LAUNCH.num_bytes // 4] = np.frombuffer(launch.tobytes(), np.int32)
        words[_LAUNCH_WORDS:] = forced.ravel()
        num_given = launch["query"]["forced"][: len(queries)].tolist()
        return Given(words, len(queries), num_given, packed)

    def prepare(self, given: Given, logits: Tensor | None = None) -> None:
        """Queue the copies of what a launch reads; `logits` as of `start`.

        No rank may start before all are prepared: ranks write to each other.
        """
        self._signal_values[:] = 0
        # The last launch has ended, and with it the copy of what it was given.
        count = len(given.words)
        words = self._given_on_host.numpy()
        words[:count] = given.words
        if logits is not None:
            stride = given.num_queries * logits.shape[2]
            words[_STRIDE_AT : _STRIDE_AT + 2] = np.array([stride], np.uint64).view(np.int32)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._given[:count].copy_(self._given_on_host[:count], non_blocking=True)
            built_for = 1 if given.num_queries == 1 else MAX_QUERIES
            self._workspace.copy_(self._fresh_workspaces[built_for])
            modules = self._modules
            sample, masks = np.zeros((), SAMPLE_BUFFERS.dtype), np.zeros((), MASKS.dtype)
            if given.choices is not None:
                sampler, first = self._sampler, self.peers[0]._sampler  # noqa: SLF001 - same class
                modules, sample = sampler.modules, sampler.upload(given.choices)
                if sampler is first:
                    sampler.begin(given.choices.masks, given.num_given)
                masks = first.where_masks_are
            out = self.logits if logits is None else logits
            record = params(self.plan.ranks).record(
                image=self.image.data_ptr(),
                vectors=self.vectors.data_ptr(),
                embedding=0 if self._embedding is None else self._embedding.data_ptr(),
                pool=self.pool.data_ptr(),
                page_tables=self.page_tables.data_ptr(),
                rope=self.rope.data_ptr(),
                workspace=self.workspace_address,
                logits=out.data_ptr(),
                forced=self._given[_LAUNCH_WORDS:].data_ptr(),
                launch=self._given.data_ptr(),
                emitted=self._emitted.data_ptr(),
                progress=self._progress.data_ptr(),
                yield_requested=self._yield_requested.data_ptr(),
                fault=self._fault.data_ptr(),
                trace=self.trace.data_ptr(),
                page_values=self.pool.stride(0),
                page_table_stride=self.page_tables.shape[1],
                embedding_scale=self._embedding_scale,
                sample=sample,
                rank=self.rank,
                peers=[peer.workspace_address for peer in self.peers],
                masks=masks,
            )
            self._params = (ctypes.c_uint8 * record.nbytes).from_buffer_copy(record.tobytes())
            if self.plan.ranks > 1:
                self._ready.record(stream)
        self._launched = modules.single if given.num_queries == 1 else modules.several
        self._queries = given.num_queries

    def await_copies(self) -> None:
        """Return once what was prepared is in the GPU's memory, of a plan of several ranks."""
        self._ready.synchronize()

    def go(self) -> None:
        """Start what was prepared, once it is so on all ranks; then `mark_end`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._launched.launch(
                self.plan.grid_blocks, THREADS, self._shared_bytes, [self._params],
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

    def _packed_choices(self, queries: Sequence[Query]) -> PackedChoices | None:
        if all(c.choice is None for c in queries):
            return None
        for c in queries:
            counts = c.choice is not None and c.choice.params.has_penalties
            assert not counts or c.stride == 1, "penalties need a stride of 1"
        vocab_size = self.plan.model.vocab_size
        return pack_choices([c.choice for c in queries], [c.position for c in queries], vocab_size)

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens, one list (a token for each query) a round, as they come.

        A query without a finite best score has a word of `NO_TOKEN` (sampling_header.py) instead.

        Raises:
            KernelStuck: a wait inside the kernel lasted too long.
            LaunchError: the kernel failed.
        """
        seen = 0
        while True:
            done = self._finished()
            ready = int(self._signal_values[0])
            while seen < ready:
                yield self._shown[seen, : self._queries].tolist()
                seen += 1
            if done:
                return
            if ready == seen:
                time.sleep(0)

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
        """The first pages of a sequence; no launch may be running."""
        row = torch.tensor(pages, dtype=torch.int32)
        self.page_tables[sequence, : len(pages)].copy_(row)

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


def _fresh_workspace(plan: Plan, queries: int) -> Tensor:
    """Sentinels everywhere, but columns of padding are zeros for good.

    Args:
        plan: of the kernel.
        queries: that a build has room for.
    """
    exchanges = plan.exchanges
    fresh = torch.full((exchanges.num_bytes,), 0xFF, dtype=torch.uint8)
    for name, op in exchanges.operands.items():
        buffer = exchanges.workspace[name]
        values = fresh[buffer.offset : buffer.offset + math.prod(buffer.shape)].view(torch.int16)
        copies = values.view(EXCHANGE_COPIES, -1, 32)
        chunks = copies.shape[1] // MAX_QUERIES  # [chunk][query][32], for fewer queries in front
        padding = op.matrix.columns - 32 * torch.arange(chunks).repeat_interleave(queries)
        is_padding = torch.arange(32) >= padding[:, None]
        copies[:, : chunks * queries].masked_fill_(is_padding, 0)
    lanes = fresh[: exchanges.lane_bytes * plan.shape.lanes_here].view(plan.shape.lanes_here, -1)
    lanes[1:] = lanes[0]
    best = exchanges.best
    fresh[best.offset : best.offset + best.num_bytes] = 0
    return fresh
