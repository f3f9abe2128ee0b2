"""Which tensors a model consists of and where a checkpoint keeps them. Pure: names and shapes.

A `TensorSpec` is one tensor of the engine, often several of the checkpoint's put together: q, k and
v are one matrix here, and so are gate and up. Matrices are [out, in], as checkpoints have them; in
a model with lanes every per-lane tensor has the lane first.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from soloist.model.dtype import Dtype

# Ends of the names of matrices inside layers.
_LAYER_MATRICES = (
    *(".qkv", ".attention_output", ".gate_up", ".down"),
    *(".latents", ".query", ".key_value", ".index_query"),  # latent attention
)


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the engine: its sources, concatenated along `axis`.

    Attributes:
        name: what the engine calls it.
        sources: tensors of the checkpoint, in order.
        axis: where they are joined.
        copies: names under which a checkpoint may hold the same tensor once more.
        expert: which of its layer's experts it belongs to; None: to none.
        is_exact: in fp32 whatever the model's precision is.
    """

    name: str
    sources: tuple[Source, ...]
    axis: int = 0
    copies: tuple[str, ...] = ()
    expert: int | None = None
    is_exact: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after concatenation."""
        first = self.sources[0].shape
        joined = sum(s.shape[self.axis] for s in self.sources)
        return (*first[: self.axis], joined, *first[self.axis + 1 :])

    @property
    def num_values(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    def held_in(self, dtype: Dtype) -> Dtype:
        """The type of its numbers in a model of this precision."""
        return Dtype.FP32 if self.is_exact else dtype

    @property
    def is_layer_matrix(self) -> bool:
        """A matrix of a layer, which quantised checkpoints shrink; routers are none."""
        return self.name.endswith(_LAYER_MATRICES)


def parameters(specs: Iterable[TensorSpec]) -> int:
    """Parameters of a model; a tied head is counted once, as it is stored once."""
    return sum(spec.num_values for spec in specs)


def head_name(specs: Iterable[TensorSpec]) -> str:
    """What a checkpoint calls the LM head, also where it is made of the embedding's tensor."""
    named = {spec.name: spec for spec in specs}
    embedding, head = named["embedding"], named.get("head")
    if head is None or head.sources == embedding.sources:
        return embedding.copies[0]
    return head.sources[0].name


def of_a_token(specs: Iterable[TensorSpec], num_chosen: int) -> list[TensorSpec]:
    """Tensors that one token needs: of a layer's experts, which are of one size, the first few.

    Args:
        specs: of the model.
        num_chosen: experts that a token chooses in a layer.
    """
    return [spec for spec in specs if spec.expert is None or spec.expert < num_chosen]


def streamed(
    specs: Iterable[TensorSpec], num_chosen: int, *, tied_head: bool
) -> Iterator[TensorSpec]:
    """What one decode step at batch 1 has to read.

    All weights that a token needs, but of an untied embedding only one row (left out as too small
    to matter).
    """
    for spec in of_a_token(specs, num_chosen):
        if tied_head or spec.name != "embedding":
            yield spec
