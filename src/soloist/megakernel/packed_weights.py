"""What the kernel is given of a model: weights in the order in which it streams them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A rank's weights as the kernel streams them, on its GPU.

    Attributes:
        image: packed matrices, uint8 [grid blocks, bytes]; `Image` says where each lies.
        vectors: fp32 norm weights and biases, of one lane after the other. Beside them, as if they
            were such values, lie the tables of columns of permuted matrices (`packing.table_of`).
        embedding: [V, H] in the plan's precision; None where the head, which is packed, is tied.
        experts: uint8, of one layer after the other, as `Experts` says; None where there are none.
    """

    image: Tensor
    vectors: Tensor
    embedding: Tensor | None
    experts: Tensor | None = None
