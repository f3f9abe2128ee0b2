"""How far logits are from others of the same text; the kernel's and prompts' of a given text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.errors import BitsDiffer
from soloist.megakernel.launch import Query
from soloist.megakernel.ranks import Launcher
from soloist.prefill.runner import Prefill

# Positions compared at once: distributions are computed in fp64.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of logits with the right ones, over T positions; in nats.

    Attributes:
        mean_kl, max_kl: KL(right ‖ these).
        nll: mean negative log-likelihood of the text under these.
        nll_difference: that minus the right one's.
        nll_standard_error: of the difference, from its spread over positions.
        top_1: share of positions with the same best token.
    """

    mean_kl: float
    max_kl: float
    nll: float
    nll_difference: float
    nll_standard_error: float
    top_1: float


def agreement(right: Tensor, logits: Tensor, targets: Tensor) -> Agreement:
    """Compare two sets of logits.

    Args:
        right: [T, V] logits to hold the others against.
        logits: [T, V], on any device.
        targets: [T] token that the text has after each position.
    """
    assert right.shape == logits.shape, "the same positions and vocabulary"
    kl, nll, differences, same = [], [], [], []
    for start in range(0, len(right), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        a = right[chunk].double().log_softmax(-1)
        b = logits[chunk].to(right.device).double().log_softmax(-1)
        next_ids = targets[chunk, None].to(right.device)
        kl.append((a.exp() * (a - b)).sum(-1))
        nll.append(-b.gather(1, next_ids)[:, 0])
        differences.append((a - b).gather(1, next_ids)[:, 0])
        same.append(a.argmax(-1) == b.argmax(-1))
    all_kl, difference = torch.cat(kl), torch.cat(differences)
    error = difference.std() / len(difference) ** 0.5 if len(difference) > 1 else torch.tensor(0.0)
    return Agreement(
        mean_kl=float(all_kl.mean()),
        max_kl=float(all_kl.max()),
        nll=float(torch.cat(nll).mean()),
        nll_difference=float(difference.mean()),
        nll_standard_error=float(error),
        top_1=float(torch.cat(same).double().mean()),
    )


def forced_logits(
    decoder: Launcher,
    vocab_size: int,
    token_ids: Sequence[int],
    columns: int,
    rounds: int,
    position: int = 0,
) -> Tensor:
    """fp32 logits [T, V] after each token of a given text, from the decode kernel.

    Args:
        decoder: with room for the text in sequence 0.
        vocab_size: V.
        token_ids: [T].
        columns: positions side by side in a round.
        rounds: most of them in a launch.
        position: of the first token; keys and values of earlier ones are there.
    """
    ids, parts, begin = list(token_ids), [], 0
    rounds = min(rounds, decoder.max_rounds)
    while begin < len(ids):
        side_by_side = min(columns, len(ids) - begin)
        here = min(rounds, (len(ids) - begin) // side_by_side)
        end = begin + here * side_by_side
        kept = torch.zeros(
            here, side_by_side, decoder.logits.shape[1], device=decoder.logits.device
        )
        decoder.run(
            [
                Query(
                    0,
                    position + begin + c,
                    ids[begin + c : end : side_by_side],
                    stride=side_by_side,
                )
                for c in range(side_by_side)
            ],
            here,
            logits=kept,
        )
        parts.append(kept.flatten(0, 1)[:, :vocab_size])
        begin = end
    return torch.cat(parts)


def prompt_logits(prefill: Prefill, token_ids: Sequence[int], page_table: Sequence[int]) -> Tensor:
    """fp32 logits [T, V] after each token of a given text, each from a pass of its own.

    A pass computes those of its last token alone, so every beginning of the text is a prompt.

    Args:
        prefill: with passes of as many tokens as the text has.
        token_ids: [T].
        page_table: pages with room for them; what they hold is overwritten.
    """
    found = []
    for stop in range(1, len(token_ids) + 1):
        logits = prefill.run(token_ids[:stop], 0, page_table, want_logits=True)
        assert logits is not None, "logits were asked for"
        found.append(logits.clone())
    return torch.stack(found)


def require_same_bits(what: str, first: Tensor, second: Tensor) -> None:
    """Two [T, V] logits are equal.

    Raises:
        BitsDiffer: they are not; the message names the first place.
    """
    if torch.equal(first, second):
        return
    position, token_id = (first != second).nonzero()[0].tolist()
    values = f"{float(first[position, token_id])} and {float(second[position, token_id])}"
    raise BitsDiffer(f"the logits of {what}", f"position {position}, token {token_id} ({values})")
