"""Drafting: which tokens may come next, guessed from texts alone. Integers, no model, no torch.

Reading order: `matching` (where a text has been before), `prediction` (follow a text that was
given), `lookup` (prompt, answer and earlier answers), `depth` (how many to draft, and whether),
`drafter` (one request's), `dealing` (several requests in one step). docs/speculation.md has it in
words.

What is drafted never changes a token: the engine checks every draft. Everything here is integer
arithmetic with bounded work for each token, so that a thread block of a GPU can follow the same
definition.
"""

from soloist.speculation.dealing import deal, most_beside
from soloist.speculation.depth import Costs
from soloist.speculation.drafter import NO_DRAFTS, Draft, Drafter, Drafting, DraftState, Tally
from soloist.speculation.lookup import Archive

__all__ = [
    "NO_DRAFTS", "Archive", "Costs", "Draft", "DraftState", "Drafter", "Drafting", "Tally", "deal",
    "most_beside",
]  # fmt: skip
