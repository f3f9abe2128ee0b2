"""One request's drafts: of a prediction where the answer follows one, else looked up."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from soloist.speculation.depth import ONE, Costs, Depth
from soloist.speculation.lookup import Archive, as_ids, following, look_up
from soloist.speculation.prediction import Prediction
from soloist.speculation.tokens import Ids, Tokens

# Where there is no archive.
_NOTHING = as_ids(())

Source = Literal["prediction", "lookup"]

# Kinds of drafts, which are accepted differently often: of a prediction, and looked up by the
# length of the match; with the share that is assumed at first.
_FIRST_PREDICTION = ONE * 9 // 10
FIRST_LOOKUP = ((16, ONE * 9 // 10), (8, ONE * 3 // 4), (4, ONE // 2), (0, ONE * 3 // 8))

# Rounds without a draft that a launch waits through: each costs it a twentieth more than a round of
# one query, and changing from one kind of launch to the other and back more than a round.
WAIT_ROUNDS = 8
# Right guesses in a row that end a rest, if that costs nothing: a wrong text has two seldom.
RIGHT_GUESSES = 2


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an executor has requests draft.

    Attributes:
        costs: of its steps.
        looks_up: whether drafts come from the texts that are there, too, or of predictions alone.
        rests_first: whether a request without a prediction rests until guesses were right.
        right_guesses: in a row, that end a rest; the more, the more steps the change itself takes.
    """

    costs: Costs
    looks_up: bool
    rests_first: bool = False
    right_guesses: int = RIGHT_GUESSES


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        ids: at least one.
        source: where they come from.
        kind: whose acceptance they belong to; for the drafter.
    """

    ids: tuple[int, ...]
    source: Source
    kind: int


@dataclass(frozen=True, slots=True)
class DraftState:
    """What an answer's next drafts depend on, for whoever drafts in the drafter's place.

    Attributes:
        prediction: the predicted text; None where there is none.
        archive: earlier answers.
        history: prompt and answer, where anything is looked up.
        at: index of the token of `prediction` that is expected next.
        is_good: whether the answer follows `prediction` there.
        depths: by kind, see `Depth.state`.
        costs: of a step, by drafts.
        looks_up: whether drafts come from other texts than the prediction.
    """

    prediction: Ids | None
    archive: Ids
    history: Ids
    at: int
    is_good: bool
    depths: tuple[tuple[int, int, int, int], ...]
    costs: tuple[int, ...]
    looks_up: bool

    def is_like(self, other: "DraftState") -> bool:
        """Whether drafts that follow are the same."""
        ours, theirs = (
            (s.at, s.is_good, s.depths, s.costs, s.looks_up, s.prediction is None)
            for s in (self, other)
        )
        texts = (
            (self.archive, other.archive),
            (self.history, other.history),
            (self.prediction, other.prediction),
        )
        return ours == theirs and all(
            np.array_equal(a, b) for a, b in texts if a is not None and b is not None
        )


# Of an answer of which nothing is drafted.
NO_DRAFTS = DraftState(
    prediction=None,
    archive=_NOTHING,
    history=_NOTHING,
    at=0,
    is_good=False,
    depths=((0, 0, 0, 0),) * (1 + len(FIRST_LOOKUP)),
    costs=(),
    looks_up=False,
)


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the drafts of an answer.

    Attributes:
        rounds: that checked a draft.
        drafted: tokens of these drafts.
        accepted: of them, those that are tokens of the answer.
        predicted: of the drafted ones, those of a prediction.
        predicted_accepted: of these, those that are tokens of the answer.
        by_place: accepted tokens by their place in a draft.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    by_place: tuple[int, ...] = ()

    def with_draft(self, draft: Draft, num_accepted: int) -> "Tally":
        """The same, and a draft that was checked, whose first tokens are tokens of the answer."""
        is_predicted, count = draft.source == "prediction", len(draft.ids)
        places = [*self.by_place, *[0] * (num_accepted - len(self.by_place))]
        for place in range(num_accepted):
            places[place] += 1
        return Tally(
            rounds=self.rounds + 1,
            drafted=self.drafted + count,
            accepted=self.accepted + num_accepted,
            predicted=self.predicted + count * is_predicted,
            predicted_accepted=self.predicted_accepted + num_accepted * is_predicted,
            by_place=tuple(places),
        )


class Drafter:
    """Drafts what may follow in one answer; one thread at a time.

    Where changing from rounds that check drafts to rounds of one query, and back, costs something,
    drafts rest while they do not pay: whoever makes rounds of one query then has each token
    guessed along. A guess is judged by the token that comes, and costs no device anything.

    Attributes:
        is_resting: whether rounds shall have one query until guesses are right.

    Args:
        drafting: how.
        prompt_ids: the prompt.
        prediction_ids: of the predicted text; None where there is none.
        archive: earlier answers; None where none are kept.
    """

    def __init__(
        self,
        drafting: Drafting,
        prompt_ids: Sequence[int],
        prediction_ids: Sequence[int] | Ids | None = None,
        archive: Archive | None = None,
    ) -> None:
        self._drafting, self._looks_up, self._archive = drafting, drafting.looks_up, archive
        self._prompt_ids = prompt_ids
        self._history: Tokens | None = None
        self._num_seen = self._num_waited = self._num_right = 0
        self._guess: Draft | None = None
        self.is_resting = drafting.rests_first and prediction_ids is None
        self._prediction = None if prediction_ids is None else Prediction(as_ids(prediction_ids))
        self._costs = costs = drafting.costs
        self._depths = [Depth(costs, _FIRST_PREDICTION)]
        self._depths += [Depth(costs, first) for _, first in FIRST_LOOKUP]

    def anew(self) -> "Drafter":
        """One for the same texts that has seen nothing of the answer."""
        ids = None if self._prediction is None else self._prediction.ids
        return Drafter(self._drafting, self._prompt_ids, ids, self._archive)

    @property
    def state(self) -> DraftState:
        """After the latest draft; its arrays are valid until the next one."""
        place = self._prediction
        return DraftState(
            prediction=None if place is None else place.ids,
            archive=_NOTHING if self._archive is None else self._archive.ids,
            history=_NOTHING if self._history is None else self._history.ids,
            at=0 if place is None else place.at,
            is_good=place is not None and place.is_good,
            depths=tuple(depth.state for depth in self._depths),
            costs=self._costs.of_drafts,
            looks_up=self._looks_up,
        )

    def draft(self, output_ids: Sequence[int], most: int) -> Draft | None:
        """What may follow the answer so far; None in a pause, or where nothing is known.

        Args:
            output_ids: all of the answer.
            most: tokens.
        """
        self._see(output_ids)
        for source, kind, ids in self._candidates(max(0, most)):
            if (draft := self._cut(source, kind, ids)) is not None:
                self._num_waited = 0
                return draft
        self._num_waited += 1
        return None

    @property
    def has_prediction(self) -> bool:
        """Whether there is a text that the answer may follow."""
        return self._prediction is not None

    @property
    def first_guess(self) -> int | None:
        """Of an answer of which nothing was seen, the first token that is predicted."""
        ids = () if self._prediction is None else self._prediction.next_ids(1).tolist()
        return ids[0] if ids else None

    @property
    def is_idle(self) -> bool:
        """Whether there is no draft now, and was or will be none for so long that a rest pays."""
        pauses = self._depths[0].num_left if self._follows else 0
        return self._num_waited > 0 and max(self._num_waited, pauses) > WAIT_ROUNDS

    def rest(self) -> None:
        """From here on rounds have one query; `watch` each of them."""
        self.is_resting, self._guess, self._num_right = True, None, 0

    def watch(self, output_ids: Sequence[int]) -> bool:
        """A round of a rest has ended: judge what was guessed, guess again; whether it is over.

        Args:
            output_ids: all of the answer.
        """
        if (guess := self._guess) is not None and len(output_ids) > self._num_seen:
            is_right = output_ids[self._num_seen] == guess.ids[0]
            self._depths[guess.kind].judge(1, int(is_right))
            self._num_right = self._num_right + 1 if is_right else 0
        self._see(output_ids)
        self._guess = next(
            (Draft((ids[0],), source, kind) for source, kind, ids in self._candidates(1)), None
        )
        if self._guess is None:
            self._num_right = 0
        elif self._may_end_rest(self._depths[self._guess.kind]):
            self.is_resting, self._num_waited = False, 0
        return not self.is_resting

    def _may_end_rest(self, depth: Depth) -> bool:
        return self._num_right >= self._drafting.right_guesses and depth.pays

    def behind(self, draft: Draft, most: int) -> tuple[int, Draft] | None:
        """The token behind a draft, and the next draft, if the answer follows the prediction.

        Nothing changes. Once the answer has come there, and the draft is judged, `draft` gives the
        same.

        Args:
            draft: the latest, of all that the answer has.
            most: tokens of the next one.

        Returns:
            None where nobody can know: at the end of the prediction, or for drafts of other texts.
        """
        if draft.source != "prediction" or self._prediction is None:
            return None
        depth, count = copy(self._depths[draft.kind]), len(draft.ids)
        depth.judge(count, count)
        most = min(max(0, most), depth.most)
        ids = self._prediction.next_ids(count + 1 + most)[count:].tolist()
        return (ids[0], replace(draft, ids=tuple(ids[1:]))) if len(ids) > 1 else None

    def judge(self, draft: Draft, num_checked: int, num_accepted: int) -> None:
        """Of the draft's first tokens so many were checked, and so many of these accepted."""
        self._depths[draft.kind].judge(num_checked, num_accepted)

    def _see(self, output_ids: Sequence[int]) -> None:
        """Take what came since the last time."""
        if self._looks_up and self._history is None:
            self._history = Tokens(self._prompt_ids)
        new = output_ids[self._num_seen :]
        self._num_seen += len(new)
        if self._history is not None:
            self._history.extend(new)
        if self._prediction is not None:
            self._prediction.take(*new)

    @property
    def _follows(self) -> bool:
        return self._prediction is not None and len(self._prediction.next_ids(1)) > 0

    def _candidates(self, most: int) -> Iterator[tuple[Source, int, Sequence[int]]]:
        """What may follow what was seen, the best first: source, kind, at least one token."""
        if self._prediction is not None and (ids := self._prediction.next_ids(most).tolist()):
            yield "prediction", 0, ids
        if not self._looks_up or most < 1:
            return
        assert self._history is not None, "it was seen"
        archive = _NOTHING if self._archive is None else self._archive.ids
        found = look_up(self._history.ids, archive)
        if found is None:
            return
        match, text = found
        kind = 1 + next(i for i, (least, _) in enumerate(FIRST_LOOKUP) if match.length >= least)
        ids = following(text, match.at, min(most, match.length))
        if len(ids):
            yield "lookup", kind, ids

    def _cut(self, source: Source, kind: int, ids: Sequence[int]) -> Draft | None:
        most = self._depths[kind].most
        if not most:
            self._depths[kind].skip()
        return Draft(tuple(ids[:most]), source, kind) if most else None
