"""What the decode kernel finds in the GPU's memory."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Weights and KV pool of a rank, or of one of its lanes.

    Any dtype: fp32 shows the layout without rounding.

    Attributes:
        image: packed weights [blocks, bytes], or values in place of bytes.
        vectors: fp32 norm weights and biases.
        embedding: [V, H], or None where the head is tied.
        rope: [positions, D / 2, 2] cosine and sine, fp32.
        pool: the tensor of a `PagePool`.
        page_tables: int32 [sequences, pages].
        first_head: a lane's first KV head in the pool.
        experts: packed, of one layer after the other, bytes or values; None where there are none.
    """

    image: Tensor
    vectors: Tensor
    embedding: Tensor | None
    rope: Tensor
    pool: Tensor
    page_tables: Tensor
    first_head: int = 0
    experts: Tensor | None = None
