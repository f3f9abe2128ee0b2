"""Sequences as columns of the decode kernel: what a GPU does where the reference did it before.

A short prompt rides the decode kernel, a longer one goes through library products in chunks. The
host chooses the first token from the prompt's logits, the kernel all others, many rounds a launch,
in which every sequence has a column.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from soloist.engine.executor import Executor, Outcome, Picked, Running, pick, picked
from soloist.engine.prefix import Node, PrefixTree
from soloist.errors import BadLogits
from soloist.megakernel.choice import Choice
from soloist.megakernel.header import MAX_STOPS
from soloist.megakernel.launch import Column
from soloist.megakernel.plan import MAX_COLUMNS, PAGE_POSITIONS
from soloist.megakernel.sampling_header import bad_score
from soloist.prefill.page_list import PageList
from soloist.prefill.runner import CHUNK_TOKENS
from soloist.sampling import Sampler

# Prompts of up to so many tokens ride the decode kernel: three rounds of eight columns take less
# time than the launches of one pass of prefill.
RIDING_TOKENS = 24


class Launches(Protocol):
    """What generating needs of a `Decoder`."""

    max_rounds: int

    @property
    def logits(self) -> Tensor:
        """[8, at least V] fp32, of the last round."""
        ...

    @property
    def page_tables(self) -> Tensor:
        """[sequences, pages] int32, to be read; `write_pages` changes them."""
        ...

    def write_pages(self, sequence: int, pages: Sequence[int]) -> None:
        """The first pages of a sequence."""
        ...

    def start(self, columns: Sequence[Column], rounds: int) -> None:
        """Start a launch."""
        ...

    def tokens(self) -> Iterator[list[int]]:
        """The launch's tokens as they come, to its end."""
        ...

    def stop(self) -> None:
        """Ask the launch to end soon."""
        ...

    def run(self, columns: Sequence[Column], rounds: int) -> list[list[int]]:
        """A launch from start to end."""
        ...


class PromptPass(Protocol):
    """What reading prompts needs of a `Prefill`."""

    most_tokens: int

    def run(
        self,
        token_ids: Sequence[int],
        position: int,
        page_table: Sequence[int],
        *,
        want_logits: bool = True,
    ) -> Tensor | None:
        """Logits [V] of the last token, where they are wanted."""
        ...


class _Running(Running):
    """A sequence with a row of the page tables.

    Attributes:
        slot: its row.
        pages: of all its positions.
        owned: those of them that it gives back; others belong to kept prefixes.
        node: the last kept block of its prompt.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        top_logprobs: int | None,
        slot: int,
        pages: list[int],
    ) -> None:
        super().__init__(prompt_ids, sampler, top_logprobs)
        self.slot, self.pages, self.owned = slot, pages, set(pages)
        self.node: Node[list[int]] | None = None


class KernelExecutor(Executor):
    """Sequences over anything that launches rounds and reads prompts.

    Every sequence is a column of each launch and owns the pages of the pool that prompt and answer
    may need.

    Args:
        decoder: runs rounds; its page tables have a row for each sequence.
        prefill: reads prompts that are too long to ride.
        num_pages: pages in the pool; at least one context's.
        vocab_size: V.
        chunk_tokens: most prompt tokens a pass.
        keeps_prefixes: leave pages of prompts in the pool, as far as nobody else needs them, for
            later prompts that begin alike.
    """

    def __init__(
        self,
        decoder: Launches,
        prefill: PromptPass,
        num_pages: int,
        vocab_size: int,
        chunk_tokens: int = CHUNK_TOKENS,
        *,
        keeps_prefixes: bool = False,
    ) -> None:
        self._launches, self._prompt_pass = decoder, prefill
        self._vocab_size = vocab_size
        self._chunk_tokens = min(chunk_tokens, prefill.most_tokens)
        self._pages = PageList(num_pages)
        self._tree: PrefixTree[list[int]] | None = None
        if keeps_prefixes and self._chunk_tokens % PAGE_POSITIONS == 0:
            self._tree = PrefixTree(self._chunk_tokens)
        self.num_columns = min(MAX_COLUMNS, decoder.page_tables.shape[0])
        self._free_slots = list(range(self.num_columns - 1, -1, -1))
        self._rows = decoder.page_tables.tolist()

    def open(
        self, prompt_ids: Sequence[int], sampler: Sampler, top_logprobs: int | None = None
    ) -> Running | None:
        """See Executor."""
        wanted = num_pages_of(len(prompt_ids) + sampler.stop_test.max_tokens)
        if not self._free_slots:
            return None
        # Of a prompt that is kept whole the last chunk is read again: it gives the logits.
        match = None if self._tree is None else self._tree.match(prompt_ids[:-1])
        kept = [] if match is None else [page for pages in match.values for page in pages]
        if self._tree is not None and match is not None:
            self._tree.use(match.node)
            if not self._make_room(wanted - len(kept)):
                self._tree.release(match.node)
        if wanted - len(kept) > self._pages.num_free:
            return None
        own = self._pages.take(wanted - len(kept))
        slot, pages = self._free_slots.pop(), kept + own
        if self._rows[slot][:wanted] != pages:
            self._rows[slot][:wanted] = pages
            self._launches.write_pages(slot, pages)
        running = _Running(prompt_ids, sampler, top_logprobs, slot, pages)
        running.owned = set(own)
        if match is not None:
            running.node, running.divergence = match.node, match.divergence
            running.num_cached = running.num_read = len(kept) * PAGE_POSITIONS
        return running

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, if need be instead of kept prefixes."""
        if self._tree is not None and (missing := pages - self._pages.num_free) > 0:
            for dropped in self._tree.drop(-(-missing * PAGE_POSITIONS // self._chunk_tokens)):
                self._pages.give_back(reversed(dropped))
        return pages <= self._pages.num_free

    def _keep(self, running: _Running, start: int, chunk: Sequence[int]) -> None:
        """Leave the pages of a chunk that was just read to later prompts, if it is whole."""
        if self._tree is None or running.node is None or len(chunk) < self._chunk_tokens:
            return
        first = start // PAGE_POSITIONS
        pages = running.pages[first : first + self._chunk_tokens // PAGE_POSITIONS]
        node, is_new = self._tree.insert(running.node, chunk, pages)
        if is_new:
            running.owned.difference_update(pages)
        self._tree.use(node)
        self._tree.release(running.node)
        running.node = node

    def read(self, running: Running) -> Picked | None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        if len(running.prompt_ids) <= RIDING_TOKENS:
            return self._ride(running)
        start = running.num_read
        chunk = running.prompt_ids[start : start + self._chunk_tokens]
        is_last = start + len(chunk) == len(running.prompt_ids)
        logits = self._prompt_pass.run(chunk, start, running.pages, want_logits=is_last)
        running.num_read += len(chunk)
        self._keep(running, start, chunk)
        return None if logits is None else pick(running, logits)

    def _ride(self, running: _Running) -> Picked:
        """Read a short prompt in rounds of its own; what follows it."""
        # Columns side by side. Those that run out of tokens before others go on with what they
        # chose: at positions behind the prompt, which the answer writes again.
        ids = running.prompt_ids
        width, last = min(len(ids), MAX_COLUMNS), (len(ids) - 1) % MAX_COLUMNS
        columns = [Column(running.slot, c, ids[c::width], stride=width) for c in range(width)]
        token_id = self._launches.run(columns, -(-len(ids) // width))[-1][last]
        running.num_read = len(ids)
        if running.top_logprobs is not None or _choice(running.sampler) is not None:
            return pick(running, self._launches.logits[last, : self._vocab_size])
        # The best one, as the kernel has found.
        if token_id >= self._vocab_size:
            raise BadLogits(len(ids), bad_score(token_id))
        running.sampler.observe(token_id)
        return Picked(token_id)

    def rounds(self, running: Sequence[Running], most: int) -> Generator[list[Outcome], None, None]:
        """See Executor.

        Where log probabilities are wanted a launch has one round: the kernel leaves the logits of
        its last round only.
        """
        shows_logits = any(r.top_logprobs is not None for r in running)
        count = 1 if shows_logits else min(most, self._launches.max_rounds)
        count = min(count, *(r.num_wanted for r in running))
        failed: dict[int, BadLogits] = {}
        self._launches.start([_column(r) for r in running], count)
        tokens = self._launches.tokens()
        try:
            for chosen in list(tokens) if shows_logits else tokens:
                yield [
                    self._outcome(column, r, chosen[column], failed)
                    for column, r in enumerate(running)
                ]
        finally:
            self._launches.stop()
            for _ in tokens:
                pass

    def _outcome(
        self, column: int, running: Running, token_id: int, failed: dict[int, BadLogits]
    ) -> Outcome:
        if token_id >= self._vocab_size:
            failed.setdefault(column, BadLogits(running.position + 1, bad_score(token_id)))
        if column in failed:
            return failed[column]
        running.sampler.observe(token_id)
        if running.top_logprobs is None:
            return Picked(token_id)
        return picked(running, token_id, self._launches.logits[column, : self._vocab_size])

    def stop(self) -> None:
        """See Executor."""
        self._launches.stop()

    def close(self, running: Running) -> None:
        """See Executor."""
        assert isinstance(running, _Running), "opened here"
        # In this order: one sequence after the other gets the same pages and an unchanged row.
        self._pages.give_back(page for page in reversed(running.pages) if page in running.owned)
        if self._tree is not None and running.node is not None:
            self._tree.release(running.node)
            running.node = None
        self._free_slots.append(running.slot)


def _column(running: Running) -> Column:
    assert isinstance(running, _Running), "opened here"
    # Of more stop tokens the caller sees the others.
    stops = sorted(running.sampler.stop_test.ending_ids)[:MAX_STOPS]
    choice = _choice(running.sampler)
    return Column(running.slot, running.position, [running.last], stops, choice=choice)


def _choice(sampler: Sampler) -> Choice | None:
    """How tokens are chosen from here on; None if every one is that with the largest logit."""
    params, ending_ids = sampler.params, sampler.stop_test.ending_ids
    is_banned = len(sampler.output_ids) < params.min_tokens and bool(ending_ids)
    if params.is_greedy and not (params.has_penalties or params.logit_bias or is_banned):
        return None
    return Choice(params, sampler.counts, ending_ids)


def num_pages_of(tokens: int) -> int:
    """Pages that so many positions of one sequence take."""
    return -(-tokens // PAGE_POSITIONS)
