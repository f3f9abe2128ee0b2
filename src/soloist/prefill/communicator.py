"""How what modules give joins the residual stream, alone or with other ranks and lanes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from soloist.kv.pool import PagePool
from soloist.model.config import ModelConfig
from soloist.prefill.batched_experts import BatchedExperts
from soloist.prefill.buffers import Buffers, allocate
from soloist.prefill.elementwise import Chunk, Delta, Elementwise, widest
from soloist.prefill.experts import ExpertProducts, MixturePass
from soloist.prefill.products import Factor, Products
from soloist.prefill.residual_streams import residual_streams_of

# Something that is queued; stops where all ranks have to come as far before any goes on.
Stages = Iterator[None]


class Workspace:
    """What a rank computes with.

    Args:
        config: what the rank has.
        pool: gains keys and values.
        operations: what runs between products.
        products: by the rank's matrices.
        most_tokens: of a chunk.

    Attributes:
        streams: what differs between kinds of models.
        buffers: of a whole chunk.
        last: of the last token in the last layer.
        logits: [1, V] of the rank.
        attended: [rows, Q · D], room for what attention gives where its product takes more rows
            than a pass has; None where it does not.
        mixtures: of experts; None in a model without.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: PagePool,
        operations: Elementwise,
        products: Products,
        most_tokens: int,
    ) -> None:
        self.config, self.streams, self.pool = config, residual_streams_of(config), pool
        self.operations, self.products = operations, products
        self.buffers, self.last = (
            allocate(config, rows, pool, gates=products.gates_all) for rows in (most_tokens, 1)
        )
        logits = (1, config.vocab_size)
        self.logits = torch.empty(logits, dtype=widest(pool), device=pool.device)
        self.attended: Tensor | None = None
        self.mixtures: MixturePass | None = None
        if config.mixtures:
            experts = products.experts
            assert experts is not None, "experts of mixtures are needed"
            if not isinstance(experts, ExpertProducts):
                experts = BatchedExperts(config, experts, pool, operations, most_tokens)
            self.mixtures = MixturePass(config, experts, pool, operations, most_tokens)


class Rows(NamedTuple):
    """Rows on their way through the layers: all of a chunk, or of the last layer the last one."""

    buffers: Buffers
    num_rows: int
    is_last: bool = False


class Narrowing(Enum):
    """From where on the last layer has the last token alone, since nobody asks for more."""

    QUERIES = auto()
    OUTPUT = auto()  # attention's
    MLP = auto()


class Communicator(ABC):
    """The residual stream of a rank, and whoever adds to it.

    A module is an attention (2 · layer) or an MLP (2 · layer + 1).

    Args:
        work: what the rank computes with.

    Attributes:
        narrowing: where `last_row` is asked for.
    """

    narrowing: Narrowing

    def __init__(self, work: Workspace) -> None:
        self._work, self._operations = work, work.operations

    @property
    def num_bytes(self) -> int:
        """Memory beside the workspace."""
        return 0

    def connect(self, ranks: Sequence["Communicator"]) -> None:  # noqa: B027 - one that is alone
        """Before the first pass: those of all ranks in order, whose memory this one can reach."""

    def is_cut(self, layers: int) -> bool:  # noqa: ARG002 - most are not
        """Whether a recorded pass is cut in two behind so many layers.

        Launching a graph takes the host a microsecond a kernel, and the device waits for it: so it
        gets a short one first.
        """
        return False

    def rows(self, count: int) -> Rows:
        """The first rows of a chunk."""
        return Rows(self.arranged(self._work.buffers.rows(count)), count)

    def new_last_row(self) -> Rows:
        """The last token's, before anything is copied there."""
        return Rows(self.arranged(self._work.last), 1, is_last=True)

    def arranged(self, b: Buffers) -> Buffers:
        """Buffers in the shapes that products and operations take."""
        return b

    @abstractmethod
    def begin(self, rows: Rows, chunk: Chunk) -> None:
        """Tokens' rows of the embedding become the residual stream."""

    @abstractmethod
    def attention_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """`normed` of all that came before an attention."""

    def before_output(self, layer: int) -> Stages:  # noqa: ARG002 - most have nothing to wait for
        """What has to be before an attention gives anything."""
        yield from ()

    @abstractmethod
    def output(self, module: int, rows: Rows) -> Tensor:
        """Where the product goes that a module gives."""

    def give_mlp(self, layer: int, rows: Rows, activated: Factor, down: str) -> None:
        """The product of `activated` with an MLP's last matrix goes where its output belongs."""
        self._work.products.multiply(activated, down, self.output(2 * layer + 1, rows))

    @abstractmethod
    def mlp_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:
        """`normed` of all that came before an MLP, the attention's output included."""

    def after_layer(self, layer: int, rows: Rows) -> Stages:  # noqa: ARG002 - the same
        """What has to be once an MLP has given its output."""
        yield from ()

    @abstractmethod
    def last_row(self, rows: Rows, chunk: Chunk) -> Rows:
        """The last token's, with a copy of what is needed from here on."""

    @abstractmethod
    def head(self, rows: Rows, chunk: Chunk) -> Stages:
        """Logits of the last token."""


class Nobody(Communicator):
    """Of a rank that is alone: sums and norms are one operation."""

    narrowing = Narrowing.QUERIES

    def __init__(self, work: Workspace) -> None:
        super().__init__(work)
        # What the last MLP gave, if in parts: the next norm adds them.
        self._parts: Tensor | None = None

    def is_cut(self, layers: int) -> bool:
        """See the base class."""
        return layers == 1

    def begin(self, rows: Rows, chunk: Chunk) -> None:
        """See the base class."""
        if self._work.products.look_up(chunk.ids, rows.buffers.residual):
            return
        table = self._work.products.matrix("embedding")
        self._operations.embed(table, chunk, rows.buffers.residual)

    def attention_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:  # noqa: ARG002
        """See the base class."""
        b, norm = rows.buffers, self._operations.layers[layer].attention_norm
        deltas = self._deltas(layer - 1, b) if layer else []
        arranged = self._work.products.takes_arranged(f"layers.{layer}.qkv")
        self._operations.add_norm(b.residual, deltas, norm, b.normed, arranged=arranged)
        yield from ()

    def output(self, module: int, rows: Rows) -> Tensor:
        """See the base class."""
        if module % 2 == 0:
            return rows.buffers.delta
        self._parts = None
        return rows.buffers.mlp_delta

    def give_mlp(self, layer: int, rows: Rows, activated: Factor, down: str) -> None:
        """See the base class."""
        out = self.output(2 * layer + 1, rows)
        given = self._work.products.multiply_in_parts(activated, down, out)
        self._parts = None if given is out else given

    def mlp_input(self, layer: int, rows: Rows, chunk: Chunk) -> Stages:  # noqa: ARG002
        """See the base class; the next norm adds the same again."""
        b, norm = rows.buffers, self._operations.layers[layer].mlp_norm
        deltas = self._deltas(layer, b)[:1]
        arranged = self._work.products.takes_arranged(f"layers.{layer}.gate_up")
        self._operations.add_norm(
            b.residual, deltas, norm, b.normed, keeps=False, arranged=arranged
        )
        yield from ()

    def last_row(self, rows: Rows, chunk: Chunk) -> Rows:
        """See the base class."""
        last = self.new_last_row()
        torch.index_select(rows.buffers.residual, 0, chunk.last, out=last.buffers.residual)
        torch.index_select(rows.buffers.normed, 0, chunk.last, out=last.buffers.normed)
        return last

    def head(self, rows: Rows, chunk: Chunk) -> Stages:  # noqa: ARG002
        """See the base class."""
        b, config = rows.buffers, self._work.config
        deltas = self._deltas(config.num_layers - 1, b)
        name, products = "embedding" if config.tied_head else "head", self._work.products
        self._operations.add_norm(
            b.residual, deltas, self._operations.final_norm, b.normed,
            arranged=products.takes_arranged(name),
        )  # fmt: skip
        products.multiply(products.factor(b.normed, name), name, self._work.logits)
        yield from ()

    def _deltas(self, layer: int, b: Buffers) -> list[Delta]:
        """What a layer gave."""
        own = self._operations.layers[layer]
        given = b.mlp_delta if self._parts is None else self._parts
        return [Delta(b.delta, own.attention_output_bias), Delta(given, own.down_bias)]
