"""The launch behind a prompt: ready while the GPU reads the prompt, begun with its first token.

Where the GPU has read a short prompt already, nothing is made ready: the token would wait for it.

All that a launch is given is known by then, but that token. To pack it, to tell the token and to
choose the next step takes the host as long as a round of a small model: Python's code has left
the caches while the prompt was read. The GPU does not wait for any of that.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from soloist.engine.executor import is_lost
from soloist.megakernel.drafting import DraftingLaunch
from soloist.megakernel.launch import Query
from soloist.megakernel.ranks import Launcher

log = logging.getLogger(__name__)


class LaunchAhead:
    """Starts launches of one decoder, of which one may have begun before it is asked for.

    Args:
        decoder: who does anything else with it, or with the pages of a launch, calls `end` first.
    """

    def __init__(self, decoder: Launcher) -> None:
        self._decoder = decoder
        self._ready: _Launch | None = None
        self._begun: _Launch | None = None

    def prepare(self, query: Query, rounds: int, drafting: DraftingLaunch | None = None) -> None:
        """Make a launch ready, whose first token is a guess.

        Args:
            query: its only one.
            rounds: at most.
            drafting: of a launch that drafts.
        """
        if drafting is None:
            self._decoder.prepare_next([query], rounds)
        else:
            self._decoder.prepare_next_drafting(query, drafting)
        self._ready = _Launch(query, rounds, drafting)

    def begin(self, first: int) -> None:
        """Start what is ready, if it is, with its first token; drafts need the one guessed."""
        ready, self._ready = self._ready, None
        if ready is None:
            return
        if ready.drafting is None or ready.query.tokens == [first]:
            self._decoder.start_next(first)
            self._begun = replace(ready, query=replace(ready.query, tokens=[first]))

    def end(self) -> None:
        """End what has begun, and drop its tokens; what is ready will not start.

        Raises:
            DeviceError: the device is lost.
        """
        begun, self._begun, self._ready = self._begun, None, None
        if begun is None:
            return
        decoder = self._decoder
        decoder.abandon()
        try:
            for _ in decoder.tokens() if begun.drafting is None else decoder.drafted_rounds():
                pass
        except Exception as error:
            if is_lost(error):
                raise
            log.exception("a launch whose tokens nobody wanted failed")

    def start(self, queries: Sequence[Query], rounds: int, *, keeps_logits: bool = False) -> None:
        """Start a launch, unless it has begun; arguments as of `Decoder.start`."""
        begun = None if keeps_logits else self._begun
        if begun is not None and begun.is_for(queries, rounds):
            self._begun = None
            return
        self.end()
        self._decoder.start(queries, rounds, keeps_logits=keeps_logits)

    def start_drafting(
        self, queries: Sequence[Query], launch: DraftingLaunch, *, keeps_logits: bool = False
    ) -> None:
        """The same for a launch that drafts; arguments as of `Decoder.start_drafting`."""
        begun = None if keeps_logits else self._begun
        if begun is not None and begun.drafts(queries, launch):
            self._begun = None
            return
        self.end()
        self._decoder.start_drafting(queries, launch, keeps_logits=keeps_logits)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a launch was given; arguments as of `LaunchAhead.prepare`."""

    query: Query
    rounds: int
    drafting: DraftingLaunch | None

    def is_for(self, queries: Sequence[Query], rounds: int) -> bool:
        """Whether it is this launch; it does not draft."""
        return self.drafting is None and rounds == self.rounds and list(queries) == [self.query]

    def drafts(self, queries: Sequence[Query], launch: DraftingLaunch) -> bool:
        """Whether it is this launch, which drafts."""
        is_like = self.drafting is not None and launch.is_like(self.drafting)
        return is_like and list(queries) == [self.query]
