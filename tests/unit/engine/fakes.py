"""A decoder and a prefill without a GPU: logits are drawn with a checksum of all tokens so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from soloist.engine.executor import Executor
from soloist.engine.request import Request
from soloist.errors import BadLogits
from soloist.kv.layout import PAGE_POSITIONS
from soloist.megakernel.choice import pack_choices
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch
from soloist.megakernel.launch import Query, pack_drafting
from soloist.megakernel.sampling_header import NO_TOKEN, SEEN_IN_PROMPT
from soloist.sampling import Sampler
from soloist.sampling.adjust import TokenCounts
from soloist.sampling.constraint import Words
from soloist.sampling.sample import sample
from soloist.speculation import Archive, Costs, Drafter, Drafting
from soloist.speculation.tokens import Tokens

VOCAB = 61
# As in the decoder, rows of padding lie behind the vocabulary.
ROWS = 64


@dataclass
class Cache:
    """The token at each place of each page, as the KV cache would have it."""

    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    bad: float | None = None

    def write(self, pages: Sequence[int], position: int, token_id: int) -> None:
        self.tokens[place(pages, position)] = token_id

    def logits(self, pages: Sequence[int], position: int) -> Tensor:
        """[ROWS] after the token at `position`; everything up to it counts, nothing behind it."""
        if self.bad is not None:
            return torch.full((ROWS,), self.bad)
        seen = [self.tokens[place(pages, p)] for p in range(position + 1)]
        return torch.cat([logits_after(seen), torch.full((ROWS - VOCAB,), torch.inf)])


def place(pages: Sequence[int], position: int) -> tuple[int, int]:
    return int(pages[position // PAGE_POSITIONS]), position % PAGE_POSITIONS


def logits_after(ids: Sequence[int]) -> Tensor:
    """[VOCAB], different for every prefix."""
    state = 7
    for i in ids:
        state = (state * 31 + i + 1) % 100_003
    generator = torch.Generator().manual_seed(state)
    return 3 * torch.randn(VOCAB, generator=generator)


@dataclass(frozen=True)
class Launch:
    queries: tuple[Query, ...]
    rounds: int


class FakeSampler:
    """Chooses a query's tokens by the definition, from what was packed when the launch started."""

    def __init__(self, query: Query) -> None:
        assert query.choice is not None
        self.params, self._query = query.choice.params, query
        packed = pack_choices([query.choice], [query.position], VOCAB)
        self._position = int(packed.steps[0]["position_low"])
        span = slice(packed.params[0]["ban_begin"], None)
        self._banned = packed.list_ids[span][: packed.params[0]["ban_count"]].tolist()
        self._counts = TokenCounts(VOCAB, [])
        self._counts.num_output = int(packed.steps[0]["num_output"])
        self.allowed = packed.masks.get(0)
        self.is_masked = self.allowed is not None
        self.is_ended = False
        if 0 in packed.seen:
            self._counts.in_prompt = packed.seen[0] >= SEEN_IN_PROMPT
            self._counts.in_output = (packed.seen[0] & (SEEN_IN_PROMPT - 1)).astype("int32")

    def choose(self, logits: Tensor, number: int) -> int:
        position = self._position + number * self._query.stride
        if self.is_ended:
            return 1  # it means nothing
        is_masked = self.is_masked and number + 1 >= len(self._query.tokens)
        assert not is_masked or self.allowed is not None, "the kernel would wait for ever"
        allowed, self.allowed = (self.allowed, None) if is_masked else (None, self.allowed)
        try:
            return sample(
                logits.numpy(), self.params, self._counts, position, self._banned, allowed
            )
        except BadLogits as error:
            return next(
                word for word, score in NO_TOKEN.values() if f" is {score} " in error.message
            )

    def observe(self, token_id: int) -> None:
        self._counts.add(token_id)


def resumed(launch: DraftingLaunch) -> Drafter:
    """A drafter that goes on from what a launch was given."""
    state, archive = launch.state, Archive()
    archive._tokens = Tokens(state.archive)
    drafting = Drafting(Costs(state.costs), state.looks_up)
    drafter = Drafter(drafting, launch.prompt_ids, state.prediction, archive)
    drafter._see(launch.output_ids)
    if (place := drafter._prediction) is not None:
        place.at, place._is_good = state.at, state.is_good
    for depth, values in zip(drafter._depths, state.depths, strict=True):
        depth.acceptance, depth._pause, depth._num_left, depth._best = values
    return drafter


class FakeDecoder:
    """Runs a round whenever the next tokens are asked for."""

    prepares_while_running = True

    def __init__(self, cache: Cache, max_rounds: int = 4096, sequences: int = 1) -> None:
        self.cache, self.max_rounds = cache, max_rounds
        self.page_tables = torch.arange(10 * sequences, dtype=torch.int32).view(sequences, 10)
        self.logits = torch.zeros(8, ROWS)
        self.launches: list[Launch] = []
        self.num_rounds = self.num_prepared = self.num_expected = 0
        self._next: tuple[Launch, list[FakeSampler | None]] | None = None
        self.is_running = self._is_asked_to_stop = False
        self.fault: Exception | None = None
        self.forced_choice: int | None = None
        self._samplers: list[FakeSampler | None] = []
        self._drafting: DraftingLaunch | None = None
        self._next_drafting: DraftingLaunch | None = None

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        assert not self.is_running, "no launch reads them"
        self.page_tables[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def start(self, queries: Sequence[Query], rounds: int) -> None:
        self._start(*self._prepared(queries, rounds))

    def prepare_next(self, queries: Sequence[Query], rounds: int) -> None:
        self._next = self._prepared(queries, rounds)
        assert not any(s.is_masked for s in self._next[1] if s), "what runs has masks of its own"
        self._next_drafting = None
        self.num_prepared += 1

    def prepare_next_drafting(self, query: Query, launch: DraftingLaunch) -> None:
        assert not self.is_running, "its texts would be overwritten"
        self.prepare_next([self._drafted(query, launch)], launch.most_tokens)
        self._next_drafting = launch

    def start_next(self, first: int | None = None) -> None:
        assert self._next is not None, "it was prepared"
        self.num_expected += 1
        launch, samplers = self._next
        if first is not None:
            (query,) = launch.queries
            assert self._next_drafting is None or query.tokens == [first], "drafts follow another"
            launch = replace(launch, queries=(replace(query, tokens=[first]),))
        self._drafting = self._next_drafting
        self._start(launch, samplers)

    def _prepared(
        self, queries: Sequence[Query], rounds: int
    ) -> "tuple[Launch, list[FakeSampler | None]]":
        assert 1 <= len(queries) <= 8
        assert 1 <= rounds <= self.max_rounds
        assert all(len(c.stops) <= 16 and c.tokens for c in queries)
        samplers = [FakeSampler(c) if c.choice else None for c in queries]
        return Launch(tuple(queries), rounds), samplers

    def _start(self, launch: Launch, samplers: "list[FakeSampler | None]") -> None:
        assert not self.is_running, "the last launch has ended"
        self.launches.append(launch)
        self._samplers, self._next = samplers, None
        self.is_running, self._is_asked_to_stop = True, False

    def tokens(self) -> Iterator[list[int]]:
        launch = self.launches[-1]
        fed = [c.tokens[0] for c in launch.queries]
        for i in range(launch.rounds):
            if self.fault is not None:
                self.is_running = False
                raise self.fault
            chosen = self._round(launch, i, fed)
            is_last = self._is_asked_to_stop or i + 1 == launch.rounds
            for n, c in enumerate(launch.queries):
                if i + 1 < len(c.tokens):
                    fed[n] = c.tokens[i + 1]
                else:
                    fed[n] = chosen[n]
                    is_last |= i + 1 > c.keep and chosen[n] in c.stops
                    is_last |= self._samplers[n] is not None and chosen[n] >= VOCAB
                sampler = self._samplers[n]
                is_last |= sampler is not None and sampler.is_ended
                if sampler is not None and fed[n] < VOCAB:
                    sampler.observe(fed[n])
            self.is_running = not is_last
            yield chosen
            if is_last:
                return

    def start_drafting(self, query: Query, launch: DraftingLaunch) -> None:
        self.start([self._drafted(query, launch)], launch.most_tokens)
        self._drafting = launch

    def _drafted(self, query: Query, launch: DraftingLaunch) -> Query:
        pack_drafting(query, launch, VOCAB)
        if (choice := query.choice) is None:
            return query
        # The kernel has counts of its own.
        counts = choice.counts.as_they_are(each_token=True)
        return replace(query, choice=replace(choice, counts=counts))

    def drafted_rounds(self) -> Iterator[DraftedRound]:  # noqa: C901 - the kernel's round
        """As the kernel makes them, with a drafter that begins as the launch was given."""
        assert self._drafting is not None
        launch, query = self._drafting, self.launches[-1].queries[0]
        drafter = resumed(launch)
        output, draft, left = [*launch.output_ids], launch.draft, launch.most_tokens
        while True:
            made: list[int] = []
            fed = [output[-1], *(draft.ids if draft else ())]
            position = query.position + len(output) - len(launch.output_ids)
            columns = [replace(query, position=position + c, stride=0) for c in range(len(fed))]
            self._samplers = []
            for c, column in enumerate(columns):
                self._samplers.append(FakeSampler(column) if column.choice else None)
                if (sampler := self._samplers[c]) is not None:
                    for token_id in (*output[len(launch.output_ids) :], *fed[1 : c + 1]):
                        sampler.observe(token_id)
            chosen = self._round(Launch(tuple(columns), 1), 0, fed)
            num_right = num_checked = 0
            for column in range(len(fed)):
                if column:
                    num_checked += 1
                    if fed[column] != made[-1]:
                        break
                    num_right += 1
                    if made[-1] in launch.stops or chosen[column] >= VOCAB:
                        break
                made.append(chosen[column])
            if draft is not None:
                drafter.judge(draft, num_checked, num_right)
            output, left = [*output, *made], left - len(made)
            stops = not set(launch.stops).isdisjoint(made) or made[0] >= VOCAB
            is_last = self._is_asked_to_stop or stops or left == 0
            self.is_running = not is_last
            yield DraftedRound(tuple(made), len(fed) - 1, draft.kind if draft else 0)
            if is_last:
                return
            draft = drafter.draft(output, min(len(launch.state.costs), left - 1))
            if draft is not None:
                ends = (n for n, token in enumerate(draft.ids) if token in launch.stops)
                draft = replace(draft, ids=draft.ids[: next(ends, len(draft.ids))])
                draft = draft if draft.ids else None

    def _round(self, launch: Launch, number: int, fed: list[int]) -> list[int]:
        self.num_rounds += 1
        positions = [c.position + number * c.stride for c in launch.queries]
        tables = [self.page_tables[c.sequence].tolist() for c in launch.queries]
        for pages, position, token_id in zip(tables, positions, fed, strict=True):
            self.cache.write(pages, position, token_id)
        for n, (pages, position) in enumerate(zip(tables, positions, strict=True)):
            self.logits[n] = self.cache.logits(pages, position)
        if self.forced_choice is not None:
            return [self.forced_choice] * len(fed)
        chosen = self.logits[: len(fed), :VOCAB].argmax(1).tolist()
        for n, sampler in enumerate(self._samplers):
            if sampler is not None:
                chosen[n] = sampler.choose(self.logits[n, :VOCAB], number)
        return chosen

    def stop(self) -> None:
        self._is_asked_to_stop = True

    def allow(self, column: int, words: Words | None) -> None:
        sampler = self._samplers[column] if column < len(self._samplers) else None
        if sampler is None or not sampler.is_masked or sampler.is_ended:
            return
        assert sampler.allowed is None, "the last mask was not used"
        sampler.allowed, sampler.is_ended = words, words is None

    def abandon(self) -> None:
        self.stop()
        for sampler in self._samplers:
            if sampler is not None and sampler.is_masked:
                sampler.is_ended = True

    def run(self, queries: Sequence[Query], rounds: int) -> list[list[int]]:
        self.start(queries, rounds)
        return list(self.tokens())


class IdleDecoder(FakeDecoder):
    """For prompts that are read alone: what begins behind them makes no round."""

    is_idle = False

    def start_next(self, first: int | None = None) -> None:  # noqa: ARG002 - it has no round
        self.is_idle = True

    def tokens(self) -> Iterator[list[int]]:
        if not self.is_idle:
            yield from super().tokens()
        self.is_idle = False


class FakePrefill:
    def __init__(self, cache: Cache, most_tokens: int = 2048, widths: tuple[int, ...] = ()) -> None:
        self.cache, self.most_tokens, self.widths = cache, most_tokens, widths
        self.chunks: list[int] = []

    def run(
        self,
        token_ids: Sequence[int],
        position: int,
        page_table: Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        assert 0 < len(token_ids) <= self.most_tokens
        for i, token_id in enumerate(token_ids, position):
            self.cache.write(page_table, i, int(token_id))
        self.chunks.append(len(token_ids))
        last = position + len(token_ids) - 1
        return self.cache.logits(page_table, last)[:VOCAB] if want_logits else None


class FakeHost:
    """Copies tokens of pages; what is fetched arrives as late as it may."""

    def __init__(self, cache: Cache, num_pages: int) -> None:
        self.cache, self.num_pages = cache, num_pages
        self._host: dict[tuple[int, int], int] = {}
        self._coming: list[tuple[int, int]] = []

    def offload(self, pages: Sequence[int], host_pages: Sequence[int]) -> bool:
        self.join()
        self._copy(self.cache.tokens, self._host, pages, host_pages)
        return True

    def fetch(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        self._coming.extend(zip(host_pages, pages, strict=True))
        for page in pages:
            for i in range(PAGE_POSITIONS):
                self.cache.tokens.pop((page, i), None)

    def join(self) -> None:
        host_pages, pages = zip(*self._coming, strict=True) if self._coming else ((), ())
        self._coming.clear()
        self._copy(self._host, self.cache.tokens, host_pages, pages)

    @staticmethod
    def _copy(
        source: dict[tuple[int, int], int],
        to: dict[tuple[int, int], int],
        source_pages: Sequence[int],
        to_pages: Sequence[int],
    ) -> None:
        for source_page, to_page in zip(source_pages, to_pages, strict=True):
            for i in range(PAGE_POSITIONS):
                to[to_page, i] = source[source_page, i]


def opened(executor: Executor, prompt: Sequence[int], sampler: Sampler, **more: object) -> Request:
    """A request that an executor has opened."""
    request = Request(prompt, sampler, **more)  # type: ignore[arg-type]
    assert executor.open(request)
    return request
