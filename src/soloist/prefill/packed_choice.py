"""Which form multiplies a packed matrix by so many tokens, and all that a start compiles. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from soloist.jit.source import Source
from soloist.megakernel.layer_kind import Operation
from soloist.megakernel.plan import Plan
from soloist.model.dtype import Dtype
from soloist.model.quantized import COLUMNS
from soloist.prefill.fragments import (
    ARRANGED_COLUMNS,
    BLOCK_FRAGMENTS,
    GROUP_FRAGMENTS,
    Fragment,
    Load,
    RowCut,
    Shares,
    best_shares,
    fragments,
)
from soloist.prefill.packed_form import (
    MOST_PARTED_TOKENS,
    MOST_PARTED_WIDTH,
    PARTS,
    SLICED_TOKEN_SLOTS,
    SLICED_WIDTH,
    WIDTHS,
    Form,
    Out,
    can_slice,
    form_of,
    gates_all,
    is_gated,
    parted_bytes,
    parts_of,
    quantize_source,
    rows_source,
    takes_eight_bits,
)
from soloist.prefill.residual_streams import residual_streams_of
from soloist.prefill.widths import CAPTURED_TOKENS, MOST_PASS_TOKENS, candidate_widths

# What a tile takes beside its products, in tokens by which it is multiplied.
_TILE_TOKENS = 16
# Wider tiles of quantised matrices leave no registers for results of this kind.
_MOST_GATED_TOKENS = 128


class FormChoice:
    """How a plan's matrices are multiplied.

    Args:
        plan: of the decode kernel.
        eight_bits: layers' matrices in FP8 with a scale per row meet activations in FP8. The head
            does not: of a prompt it has one token.

    Attributes:
        plan, eight_bits: as given.
    """

    def __init__(self, plan: Plan, *, eight_bits: bool = False) -> None:
        self.plan, self.eight_bits = plan, eight_bits
        self._found: dict[tuple[Operation, int, bool], tuple[Fragment, ...]] = {}

    def in_eight_bits(self, operation: Operation) -> bool:
        """Whether a matrix meets activations in 8 bits."""
        is_layers = operation is not self.plan.image.head
        return self.eight_bits and is_layers and takes_eight_bits(operation.matrix)

    def fragments(self, operation: Operation, first: int, *, gated: bool) -> tuple[Fragment, ...]:
        """Of a matrix, from a row on; made once."""
        which = (operation, first, gated)
        if which not in self._found:
            plan = self.plan
            self._found[which] = fragments(
                plan.shape, operation, plan.image.block_stride, gated=gated, first=first
            )
        return self._found[which]

    def of(
        self, operation: Operation, tokens: int, kind: Out, first: int = 0
    ) -> tuple[Form, RowCut]:
        """How so many tokens are multiplied, and how the matrix's rows are cut.

        Only short passes have sums in parts and slices: bits of others are the same for any number
        of tokens.

        Args:
            operation: the decode kernel's.
            tokens: of the pass.
            kind: what becomes of sums, were there no parts.
            first: row from which on results are wanted.
        """
        matrix, num_sms = operation.matrix, self.plan.gpu.num_sms
        eight_bits, gated = self.in_eight_bits(operation), is_gated(kind)
        found = self.fragments(operation, first, gated=gated)
        results = tokens * (matrix.rows // 2 if gated else matrix.rows)
        may_part = tokens <= MOST_PARTED_TOKENS and not gated and first == 0
        most = parted_bytes(self.plan) // Dtype.FP32.num_bytes
        fits = may_part and PARTS[-1] * results <= most and results % 4 == 0
        columns, value_bits = matrix.columns, matrix.format.value_bits

        def shares(width: int) -> Shares:
            tiles = -(-tokens // width)
            return best_shares(
                Load(len(found), columns, value_bits, width, tiles, eight_bits), num_sms,
                parts=parts_of(columns) if fits and width <= MOST_PARTED_WIDTH else (1,),
                multiple=GROUP_FRAGMENTS if kind is Out.ARRANGED else 1,
            )  # fmt: skip

        row_tiles = -(-len(found) // BLOCK_FRAGMENTS)
        widths = widths_for(tokens, kind, row_tiles, num_sms)
        width = min(widths, key=lambda width: shares(width).cycles)
        rows, parts, _ = shares(width)
        form = form_of(matrix, self.plan.dtype, width, kind if parts == 1 else Out.WIDE)
        form = replace(form, parts=parts, eight_bits=eight_bits)
        is_short = tokens <= MOST_PARTED_TOKENS and width == SLICED_WIDTH
        if is_short and rows.each <= GROUP_FRAGMENTS and can_slice(form):
            form = replace(form, sliced=True, token_slots=SLICED_TOKEN_SLOTS)
        return form, rows


def gated_out(operation: Operation, down: Operation) -> Out:
    """How SwiGLU leaves gate_up's product: as `down` reads it, if it does in columns' order."""
    neurons = operation.matrix.rows // 2
    is_plain = COLUMNS not in down.matrix.format.parts and neurons % ARRANGED_COLUMNS == 0
    return Out.ARRANGED if is_plain else Out.GATED


def widths_for(tokens: int, out: Out, row_tiles: int, num_sms: int) -> Sequence[int]:
    """Of tiles that may be quickest for so many tokens.

    Of few tokens the narrowest that holds them, and what holds half of them: a warp is done with
    fewer tokens sooner, and more SMs have some.

    Args:
        tokens: of the pass.
        out: what becomes of sums.
        row_tiles: tiles of the matrix's rows.
        num_sms: of the GPU, each of which has a tile at a time.
    """
    least = WIDTHS[1] if out is Out.ARRANGED else WIDTHS[0]
    most = _MOST_GATED_TOKENS if out is Out.GATED else WIDTHS[-1]
    fit = [width for width in WIDTHS if least <= width <= most]
    if tokens <= fit[-1]:
        holds = next(width for width in fit if width >= tokens)
        halves = holds <= MOST_PARTED_TOKENS and holds // 2 in fit
        return (holds, holds // 2) if halves else (holds,)

    def taken(width: int) -> int:
        tiles = row_tiles * -(-tokens // width)
        return -(-tiles // num_sms) * (width + _TILE_TOKENS)

    wide = [width for width in fit if 2 * width >= fit[-1]]
    return (min(reversed(wide), key=taken),)


def forms_of_passes(choice: FormChoice, sizes: Sequence[int]) -> Iterator[Form]:
    """Of all products of passes of so many tokens, and of what is made of the last one alone."""
    plan = choice.plan
    is_wide = residual_streams_of(plan.model).wide_products(plan.dtype)
    product = Out.WIDE if is_wide else Out.VALUES
    keys_at = plan.shape.query_heads * plan.shape.head_dim
    for tokens in (1, *sizes):
        for kind in plan.image.kinds:
            own = kind.operations
            gated = gated_out(own["gate_up"], own["down"]) if gates_all(plan) else Out.VALUES
            outs = {"qkv": product, "attention_output": product, "gate_up": gated, "down": product}
            for name, out in outs.items():
                yield choice.of(own[name], tokens, out)[0]
            yield choice.of(own["qkv"], tokens, product, keys_at)[0]
    yield choice.of(plan.image.head, 1, Out.WIDE)[0]


def packed_sources(choice: FormChoice) -> tuple[Source, ...]:
    """All that prompts from packed weights compile, each once."""
    plan = choice.plan
    sizes = sorted({*candidate_widths(MOST_PASS_TOKENS), *CAPTURED_TOKENS, MOST_PASS_TOKENS})
    forms = dict.fromkeys(forms_of_passes(choice, sizes))
    head = plan.image.head.matrix
    beside = [rows_source(head.format, plan.dtype, head.steps)]
    if choice.eight_bits:
        beside.append(quantize_source(plan.dtype))
    return tuple(dict.fromkeys([*(form.source for form in forms), *beside]))
