"""Prompts of mixtures from experts as they are packed: what is compiled, and which rows. Pure.

The kernels are `cuda/kernels/packed_product.cu`, whose rows are grouped by expert, and
`cuda/kernels/expert_rows.cu` beside it.
"""

from collections.abc import Iterator
from dataclasses import replace

from soloist.jit.source import Source
from soloist.megakernel.layer_kind import LayerKind, Operation
from soloist.megakernel.partition import RowOrder
from soloist.megakernel.plan import Plan
from soloist.megakernel.program import OF_EXPERTS
from soloist.model.config import Router
from soloist.model.dtype import Dtype
from soloist.prefill.fragments import ARRANGED_COLUMNS
from soloist.prefill.packed_form import ARCH, PIECE, Form, Out, form_of

ROWS_KERNEL = "kernels/expert_rows.cu"
ROWS_ENTRIES = ("route", "choose", "cut", "take", "add_shares")
# Of blocks of `route`, `choose` and `cut`; a thread of `route` has two logits.
ROUTED_TOKENS, ROUTED_EXPERTS, CHOOSING_WARPS, CUT_WARPS = 16, 32, 4, 32
_WORD_BYTES = 4
# Most rows of a piece, ascending: a narrow product reads weights as quickly, and wastes less.
_NARROW, _WIDE, _WIDEST = PIECE_ROWS = 64, 128, 160
# Rows of an expert, on average, from which on most fill a wide piece.
_LEAST_WIDE_SHARE = 96
# About as many as a wide piece has. Half of all experts would begin a second one, of a few rows;
# the widest pieces have room for all of one, where tokens choose at random.
_WIDEST_SHARES = range(112, 137)


def reads_packed_experts(plan: Plan) -> bool:
    """Whether prompts are multiplied by experts as they are packed; elsewhere by their rows."""
    if plan.gpu.arch != ARCH or not plan.has_experts:
        return False
    return all(
        plan.model.hidden_size % ARRANGED_COLUMNS == 0
        and kind.operations["down"].matrix.columns % ARRANGED_COLUMNS == 0
        and kind.operations["gate_up"].matrix.order is RowOrder.PAIRED
        for kind in _kinds(plan)
    )


def piece_rows(router: Router, tokens: int) -> int:
    """Most rows of a piece, for a pass of so many tokens."""
    share = tokens * router.num_chosen // router.num_experts
    if share in _WIDEST_SHARES:
        return _WIDEST
    return _WIDE if share >= _LEAST_WIDE_SHARE else _NARROW


def most_pieces(router: Router, tokens: int) -> int:
    """That so many tokens can need: an expert's last piece may be filled in part."""
    return router.num_experts + tokens * router.num_chosen // piece_rows(router, tokens)


def expert_form(plan: Plan, operation: Operation, rows: int) -> Form:
    """How rows of experts are multiplied, so many of one at a time: neurons, or sums in fp32."""
    out = Out.ARRANGED if operation.matrix.order is RowOrder.PAIRED else Out.WIDE
    return replace(form_of(operation.matrix, plan.dtype, rows, out), grouped=True)


def expert_rows_source(plan: Plan, router: Router) -> Source:
    """Of the kernels that choose experts, sort rows by them, and add what they give."""
    bools = {
        "kBf16": plan.dtype is Dtype.BF16,
        "kIsSoftmax": router.scores == "softmax",
        "kIsCorrected": router.is_corrected,
        "kNormalises": router.normalises,
    }
    numbers = {
        "kExperts": router.num_experts,
        "kChosen": router.num_chosen,
        "kRowValues": plan.model.hidden_size,
        "kRoutedTokens": ROUTED_TOKENS,
        "kRoutedExperts": ROUTED_EXPERTS,
        "kChoosingWarps": CHOOSING_WARPS,
        "kCutWarps": CUT_WARPS,
    }
    lines = [
        "// Generated; see prefill/expert_form.py.",
        "#pragma once",
        '#include "ptx/types.cuh"',
        *(f"constexpr bool {name} = {str(x).lower()};" for name, x in bools.items()),
        f"constexpr float kLeastSum = {float(router.least_sum)!r}f;",
        f"constexpr float kShareScale = {float(router.scale)!r}f;",
        *(f"constexpr unsigned {name} = {n}u;" for name, n in numbers.items()),
        PIECE.cuda,
    ]
    return Source(ROWS_KERNEL, "\n".join(lines) + "\n")


def expert_sources(plan: Plan) -> tuple[Source, ...]:
    """Everything that is compiled for prompts of a plan's mixtures that it knows, each once."""
    found: list[Source] = []
    for kind in _kinds(plan):
        operations = [kind.operations[name] for name in OF_EXPERTS]
        found += [expert_form(plan, op, n).source for op in operations for n in PIECE_ROWS]
        assert kind.experts is not None, "a mixture"
        found.append(expert_rows_source(plan, kind.experts.router))
    return tuple(dict.fromkeys(found))


def packed_experts_bytes(plan: Plan, most_tokens: int) -> int:
    """What a pass of so many tokens takes for its experts, on a rank."""
    slots = most_slots(plan, most_tokens)
    hidden, neurons, value = plan.model.hidden_size, most_neurons(plan), plan.dtype.num_bytes
    # Activations, sums, neurons; share, expert, row and token.
    each = hidden * (value + _WORD_BYTES) + neurons * value + 5 * _WORD_BYTES
    logits = most_tokens * most_experts(plan) * _WORD_BYTES
    return slots * each + logits + table_bytes(plan, most_tokens)


def table_bytes(plan: Plan, most_tokens: int) -> int:
    """Of how many pieces there are, and of the pieces of a pass of at most so many tokens."""
    pieces = most_experts(plan) + most_slots(plan, most_tokens) // _NARROW
    return (1 + pieces) * PIECE.num_bytes


def most_slots(plan: Plan, tokens: int) -> int:
    """Experts that so many tokens choose, counted for each of them."""
    return tokens * max(kind.experts.router.num_chosen for kind in _kinds(plan) if kind.experts)


def most_experts(plan: Plan) -> int:
    """Of a layer."""
    return max(kind.experts.router.num_experts for kind in _kinds(plan) if kind.experts)


def most_neurons(plan: Plan) -> int:
    """Of the largest expert."""
    return max(kind.operations["down"].matrix.columns for kind in _kinds(plan))


def _kinds(plan: Plan) -> Iterator[LayerKind]:
    return (kind for kind in plan.image.kinds if kind.experts is not None)
