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
from soloist.megakernel.drafting import DraftedRound, DraftingLaunch, DraftingSequence
from soloist.megakernel.launch import Query, pack_drafting
from soloist.megakernel.limits import KEPT_ROUNDS, MAX_QUERIES
from soloist.megakernel.sampling_header import NO_TOKEN, SEEN_IN_PROMPT
from soloist.sampling import Sampler
from soloist.sampling.adjust import TokenCounts
from soloist.sampling.constraint import Words
from soloist.sampling.sample import sample
from soloist.speculation import Archive, Costs, Draft, Drafter, Drafting, deal
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


def resumed(given: DraftingSequence) -> Drafter:
    """A drafter that goes on from what a launch was given."""
    state, archive = given.state, Archive()
    archive._tokens = Tokens(state.archive)
    drafting = Drafting(Costs(state.costs), state.looks_up)
    drafter = Drafter(drafting, given.prompt_ids, state.prediction, archive)
    drafter._see(given.output_ids)
    if (place := drafter._prediction) is not None:
        place.at, place._is_good = state.at, state.is_good
    for depth, values in zip(drafter._depths, state.depths, strict=True):
        depth.acceptance, depth._pause, depth._num_left, depth._best = values
    return drafter


class FakeSequence:
    """A sequence of a launch that drafts, in the kernel's place."""

    def __init__(self, query: Query, given: DraftingSequence) -> None:
        self.query, self.given, self.draft = query, given, given.draft
        self.output, self.left = [*given.output_ids], given.most_tokens
        self._drafter = resumed(given)

    @property
    def fed(self) -> list[int]:
        return [self.output[-1], *(self.draft.ids if self.draft else ())]

    def columns(self) -> list[tuple[Query, FakeSampler | None]]:
        """The round's queries, each of which counts what stands before it."""
        made, fed = self.output[len(self.given.output_ids) :], self.fed
        columns = list[tuple[Query, FakeSampler | None]]()
        for c in range(len(fed)):
            column = replace(self.query, position=self.query.position + len(made) + c, stride=0)
            sampler = FakeSampler(column) if column.choice else None
            if sampler is not None:
                for token_id in (*made, *fed[1 : c + 1]):
                    sampler.observe(token_id)
            columns.append((column, sampler))
        return columns

    def take(self, chosen: list[int]) -> tuple[DraftedRound, bool]:
        """What the round makes, and whether that ends the launch."""
        made, fed, stops = list[int](), self.fed, self.given.stops
        num_right = num_checked = 0
        for column in range(len(fed)):
            if column:
                num_checked += 1
                if fed[column] != made[-1]:
                    break
                num_right += 1
                if made[-1] in stops or chosen[column] >= VOCAB:
                    break
            made.append(chosen[column])
        if self.draft is not None:
            self._drafter.judge(self.draft, num_checked, num_right)
        self.output, self.left = [*self.output, *made], self.left - len(made)
        ends = not set(stops).isdisjoint(made) or made[0] >= VOCAB or self.left == 0
        kind = self.draft.kind if self.draft else 0
        return DraftedRound(tuple(made), len(fed) - 1, kind), ends

    def offer(self) -> Draft | None:
        draft = self._drafter.draft(self.output, min(len(self.given.state.costs), self.left - 1))
        if draft is None:
            return None
        ends = (n for n, token in enumerate(draft.ids) if token in self.given.stops)
        draft = replace(draft, ids=draft.ids[: next(ends, len(draft.ids))])
        return draft if draft.ids else None


def dealt(sequences: Sequence[FakeSequence], most_beside: int) -> None:
    """What each offers, as far as there are queries for it."""
    drafts = [one.offer() for one in sequences]
    counts = deal([len(x.ids) if x else 0 for x in drafts], MAX_QUERIES, most_beside)
    for one, draft, count in zip(sequences, drafts, counts, strict=True):
        one.draft = replace(draft, ids=draft.ids[:count]) if draft and count else None


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
        self._keeps_logits, self._kept = False, dict[int, Tensor]()
        self._drafting: DraftingLaunch | None = None
        self._next_drafting: DraftingLaunch | None = None

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        assert not self.is_running, "no launch reads them"
        self.page_tables[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def start(self, queries: Sequence[Query], rounds: int, *, keeps_logits: bool = False) -> None:
        assert not keeps_logits or rounds <= KEPT_ROUNDS
        self._start(*self._prepared(queries, rounds))
        self._keeps_logits = keeps_logits

    def prepare_next(self, queries: Sequence[Query], rounds: int) -> None:
        self._next = self._prepared(queries, rounds)
        assert not any(s.is_masked for s in self._next[1] if s), "what runs has masks of its own"
        self._next_drafting = None
        self.num_prepared += 1

    def prepare_next_drafting(self, query: Query, launch: DraftingLaunch) -> None:
        assert not self.is_running, "its texts would be overwritten"
        self.prepare_next(self._drafted([query], launch), launch.most_rounds)
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
        self._keeps_logits = False
        self._kept.clear()

    def tokens(self) -> Iterator[list[int]]:
        launch = self.launches[-1]
        fed = [c.tokens[0] for c in launch.queries]
        for i in range(launch.rounds):
            if self.fault is not None:
                self.is_running = False
                raise self.fault
            chosen = self._round(launch, i, fed)
            self._keep(i)
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

    def start_drafting(
        self, queries: Sequence[Query], launch: DraftingLaunch, *, keeps_logits: bool = False
    ) -> None:
        assert not keeps_logits or launch.most_rounds <= KEPT_ROUNDS
        self.start(self._drafted(queries, launch), launch.most_rounds)
        self._drafting, self._keeps_logits = launch, keeps_logits

    def _drafted(self, queries: Sequence[Query], launch: DraftingLaunch) -> list[Query]:
        pack_drafting(queries, launch, VOCAB)
        # The kernel has counts of its own.
        return [
            query
            if (choice := query.choice) is None
            else replace(
                query,
                choice=replace(choice, counts=choice.counts.as_they_are(each_token=True)),
            )
            for query in queries
        ]

    def drafted_rounds(self) -> Iterator[list[DraftedRound]]:
        """As the kernel makes them, with drafters that begin as the launch was given."""
        launch, queries = self._drafting, self.launches[-1].queries
        assert launch is not None
        sequences = [FakeSequence(*one) for one in zip(queries, launch.sequences, strict=True)]
        for number in range(launch.most_rounds):
            columns = [x for one in sequences for x in one.columns()]
            self._samplers = [sampler for _, sampler in columns]
            fed = [x for one in sequences for x in one.fed]
            chosen = self._round(Launch(tuple(c for c, _ in columns), 1), 0, fed)
            self._keep(number)
            made, is_last = list[DraftedRound](), number + 1 == launch.most_rounds
            for one in sequences:
                count = len(one.fed)
                told, ends = one.take(chosen[:count])
                chosen = chosen[count:]
                made.append(told)
                is_last |= ends
            is_last |= self._is_asked_to_stop
            self.is_running = not is_last
            yield made
            if is_last:
                return
            dealt(sequences, launch.most_beside)

    def _keep(self, number: int) -> None:
        """Logits of a round, if they are kept: they are there once the next one was told."""
        if self._keeps_logits:
            self._kept[number] = self.logits.clone()

    def logits_of(self, number: int, column: int) -> Tensor:
        if not self._keeps_logits:
            assert number == 0, "logits of other rounds are lost"
            return self.logits[column]
        assert not self.is_running or number + 1 in self._kept, "it may not be in memory"
        return self._kept[number][column]

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
