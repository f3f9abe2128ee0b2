"""Each token's own experts, multiplied by the device's library in pieces of one shape.

The rows of an expert are cut into pieces of as many rows each, the last one filled up, and as many
pieces are multiplied at once: every product is of one shape, whatever tokens chose. So a token's
bits depend on neither who else chose its experts nor the number of rows of its pass. How many
pieces there may be follows from the number of rows, and which expert a piece is of only the device
knows: the host waits for nothing, and a graph can be recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import Mixture, ModelConfig, Router
from soloist.model.dtype import Dtype
from soloist.prefill.elementwise import Elementwise, widest
from soloist.prefill.experts import ROUTER_ROWS, ExpertProducts, mixture_of
from soloist.prefill.widths import MOST_PASS_TOKENS
from soloist.reference.experts import Choice, choose

# Rows of a piece: an expert's share of the widest pass, within these.
_LEAST_ROWS, _MOST_ROWS = 64, 256
# Pieces that are multiplied at once: enough to fill a GPU, of large experts fewer.
_MOST_PIECES, _MOST_VALUES = 16, 1 << 26
_FP32_BYTES, _PLACE_BYTES = 4, 8


# gate_up [G, 2 F, H] and down [G, H, F] of a layer's experts, whose numbers [G] the device has;
# valid until the next call.
ExpertMatrices = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def piece_rows(router: Router) -> int:
    """Rows of a piece, a power of two."""
    share = MOST_PASS_TOKENS * router.num_chosen // router.num_experts
    power: int = 1 << max(0, share - 1).bit_length()
    return min(max(power, _LEAST_ROWS), _MOST_ROWS)


def pieces_at_once(mixture: Mixture, hidden_size: int) -> int:
    """Pieces whose matrices are there at once."""
    values = 2 * mixture.expert.intermediate_size * hidden_size
    return max(1, min(_MOST_PIECES, _MOST_VALUES // values))


def num_pieces(mixture: Mixture, hidden_size: int, tokens: int) -> int:
    """Pieces that so many tokens may need, whatever they choose, in whole groups.

    An expert that has any rows has one piece, and one more for each whole piece before its last.
    """
    router, at_once = mixture.router, pieces_at_once(mixture, hidden_size)
    chosen, rows = tokens * router.num_chosen, piece_rows(router)
    most = min(router.num_experts, chosen) + (chosen // rows if tokens > rows else 0)
    return -(-most // at_once) * at_once


@dataclass(frozen=True, slots=True)
class Pieces:
    """Which rows of which experts are multiplied together.

    Attributes:
        experts: [N], of each piece; of one without rows any.
        slots: [N, rows]: token · k + which of its experts; of rows of padding T · k.
    """

    experts: Tensor
    slots: Tensor


def pieces_of(mixture: Mixture, hidden_size: int, chosen: Tensor) -> Pieces:
    """Cut the rows of all experts into pieces, in the order of experts and then of tokens.

    Args:
        mixture: the layer's.
        hidden_size: H.
        chosen: [T, k], each token's experts.
    """
    flat, rows = chosen.flatten(), piece_rows(mixture.router)
    count, device = len(flat), chosen.device
    order = flat.argsort(stable=True)
    of_rows = flat[order]
    numbers = torch.arange(mixture.router.num_experts, device=device)
    first = torch.searchsorted(of_rows, numbers)
    stop = torch.searchsorted(of_rows, numbers, right=True)
    own = (stop - first + rows - 1) // rows
    ends = own.cumsum(0)
    piece = torch.arange(num_pieces(mixture, hidden_size, len(chosen)), device=device)
    # Pieces behind the last one lie behind the last expert's rows.
    experts = torch.searchsorted(ends, piece, right=True).clamp_(max=len(numbers) - 1)
    within = piece - (ends - own)[experts]
    start = first[experts] + within * rows
    places = start[:, None] + torch.arange(rows, device=device)
    slots = torch.where(places < stop[experts][:, None], order[places.clamp(max=count - 1)], count)
    return Pieces(experts, slots)


class BatchedExperts(ExpertProducts):
    """Products with rows of experts, which lie in memory some at a time.

    Args:
        config: what the rank has, with a mixture in some layer.
        matrices: of its experts.
        pool: says device and dtype.
        operations: has SwiGLU.
        most_tokens: of a pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        matrices: ExpertMatrices,
        pool: PagePool,
        operations: Elementwise,
        most_tokens: int,
    ) -> None:
        self._config, self._matrices, self._operations = config, matrices, operations
        self._hidden = config.hidden_size
        sizes = _Sizes(config, most_tokens)
        wide = widest(pool)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=pool.device)

        self._router_input = empty(torch.float32, ROUTER_ROWS, self._hidden).zero_()
        self._logits = empty(torch.float32, sizes.logits)
        self._total = empty(torch.float32, most_tokens, self._hidden)
        self._results = empty(wide, sizes.results, self._hidden)
        self._given = empty(wide, sizes.given)
        self._rows = empty(pool.dtype, sizes.given)
        self._gate_up = empty(pool.dtype, 2 * sizes.neurons)
        self._activated = empty(pool.dtype, sizes.neurons)

    @property
    def num_bytes(self) -> int:
        """See ExpertProducts."""
        held = (
            self._router_input, self._logits, self._total, self._results, self._given, self._rows,
            self._gate_up, self._activated,
        )  # fmt: skip
        return sum(x.numel() * x.element_size() for x in held)

    def choose(
        self, layer: int, normed: Tensor, router: Tensor, correction: Tensor | None
    ) -> Choice:
        """See ExpertProducts; logits are multiplied always as many at a time."""
        tokens, count = len(normed), len(router)
        padded = -(-tokens // ROUTER_ROWS) * ROUTER_ROWS
        logits = self._logits[: padded * count].view(padded, count)
        for start in range(0, tokens, ROUTER_ROWS):
            own = normed[start : start + ROUTER_ROWS]
            self._router_input[: len(own)].copy_(own)
            part = logits[start : start + ROUTER_ROWS]
            torch.mm(self._router_input, router.mT, out=part)
        return choose(mixture_of(self._config, layer).router, logits[:tokens], correction)

    def __call__(
        self, layer: int, normed: Tensor, choice: Choice, out: Tensor, beside: Tensor | None = None
    ) -> None:
        """See ExpertProducts."""
        mixture = mixture_of(self._config, layer)
        tokens, k = choice.experts.shape
        pieces = pieces_of(mixture, self._hidden, choice.experts)
        # A row behind all others takes what padding gives.
        results, at_once = self._results[: tokens * k + 1], pieces_at_once(mixture, self._hidden)
        groups = (torch.split(x, at_once) for x in (pieces.experts, pieces.slots))
        for experts, slots in zip(*groups, strict=True):
            # Rows of padding read the last token, since those of a product do not mix.
            of_rows = (slots.flatten() // k).clamp_(max=tokens - 1)
            x = self._rows[: len(of_rows) * self._hidden].view(-1, self._hidden)
            torch.index_select(normed, 0, of_rows, out=x)
            given = self.multiply(layer, experts, x.view(*slots.shape, -1))
            results.index_copy_(0, slots.flatten(), given.flatten(0, 1))
        each, total = results[:-1].view(tokens, k, -1), self._total[:tokens]
        if beside is None:
            torch.mul(each[:, 0], choice.shares[:, :1], out=total)
        else:
            total.copy_(beside)
        for i in range(1 if beside is None else 0, k):
            total.addcmul_(each[:, i].to(total.dtype), choice.shares[:, i : i + 1])
        out.copy_(total)

    def multiply(self, layer: int, experts: Tensor, x: Tensor) -> Tensor:
        """What experts [G] give of `x` [G, rows, H], each of its own: the same, in fp32 on CUDA."""
        count, rows, hidden = x.shape
        neurons = mixture_of(self._config, layer).expert.intermediate_size
        gate_up, down = self._matrices(layer, experts)
        product = self._gate_up[: count * rows * 2 * neurons].view(count, rows, -1)
        activated = self._activated[: count * rows * neurons].view(count, rows, -1)
        given = self._given[: count * rows * hidden].view(count, rows, -1)
        torch.bmm(x, gate_up.mT, out=product)
        self._operations.silu_mul(product, None, activated)
        if given.dtype is x.dtype:
            torch.bmm(activated, down.mT, out=given)
        else:
            torch.bmm(activated, down.mT, out_dtype=given.dtype, out=given)
        return given

    def keeps_bits(self, layer: int, row: Tensor, router: Tensor) -> bool:
        """See ExpertProducts."""
        self.choose(layer, row.expand(ROUTER_ROWS, -1), router, None)
        logits = self._logits[: ROUTER_ROWS * len(router)].view(ROUTER_ROWS, -1)
        mixture = mixture_of(self._config, layer)
        pieces, rows = pieces_at_once(mixture, self._hidden), piece_rows(mixture.router)
        same = torch.zeros(pieces, dtype=torch.int64, device=row.device)
        given = self.multiply(layer, same, row.expand(pieces, rows, -1).contiguous())
        return bool((logits == logits[:1]).all()) and bool((given == given[:1, :1]).all())


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Values of the buffers of a model's mixtures, in a pass of at most so many tokens."""

    config: ModelConfig
    most_tokens: int

    @property
    def logits(self) -> int:
        padded = -(-self.most_tokens // ROUTER_ROWS) * ROUTER_ROWS
        return padded * max(m.router.num_experts for m in self.config.mixtures)

    @property
    def results(self) -> int:
        """Rows of H values."""
        return self.most_tokens * max(m.router.num_chosen for m in self.config.mixtures) + 1

    @property
    def given(self) -> int:
        return self.config.hidden_size * max(map(self._rows_at_once, self.config.mixtures))

    @property
    def neurons(self) -> int:
        return max(self._rows_at_once(m) * m.expert.intermediate_size for m in self.config.mixtures)

    def _rows_at_once(self, mixture: Mixture) -> int:
        return pieces_at_once(mixture, self.config.hidden_size) * piece_rows(mixture.router)


def batched_bytes(config: ModelConfig, dtype: Dtype, most_tokens: int) -> int:
    """Most that experts take in a pass of so many tokens, on a rank that has these sizes.

    Beside rows of experts, which whoever has their matrices counts.
    """
    if not config.mixtures:
        return 0
    sizes, hidden, value = _Sizes(config, most_tokens), config.hidden_size, dtype.num_bytes
    wide = (ROUTER_ROWS + most_tokens + sizes.results) * hidden + sizes.logits + sizes.given
    narrow = sizes.given + 3 * sizes.neurons
    slots = max(num_pieces(m, hidden, most_tokens) * piece_rows(m.router) for m in config.mixtures)
    # Scores, ranks, a sort and its places; then places and slots of rows, sorted and not.
    routing = 6 * sizes.logits + 8 * sizes.results + 4 * slots
    # Recorded passes have such values of their own beside those of others.
    return wide * _FP32_BYTES + narrow * value + 2 * routing * _PLACE_BYTES
