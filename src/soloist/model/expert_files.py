"""Experts in checkpoints: what they are called, and tensors that hold those of a whole layer. Pure.

Families know a matrix for each expert. Files may instead have one tensor [E, 2 I, H] of a layer's
gates and ups, gates first, and one [E, H, I] of its downs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from soloist.errors import WrongShape
from soloist.model.stored import Piece, StoredTensor


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the checkpoints of a family call modules of a layer with experts.

    Attributes:
        block: holds all of them.
        gate, up, down: matrices of an expert.
        shared: what every token takes.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


NAMES: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ExpertNames(shared="shared_expert"),
}
USUAL = ExpertNames()

# As transformers has them in memory from version 5 on, whatever the family.
_STACK = re.compile(
    r"(?P<layer>.*\.layers\.\d+)\.mlp\.experts\.(?P<stack>gate_up|down)_proj(?P<scales>_scale_inv)?"
)
_ROUTER = re.compile(r"(?P<layer>.*\.layers\.\d+)\.mlp\.gate\.weight")


def names_of(family: object) -> ExpertNames:
    """Those of a family; of any other the usual ones."""
    return NAMES.get(family, USUAL) if isinstance(family, str) else USUAL


def parted(tensors: Mapping[str, StoredTensor], family: object) -> dict[str, StoredTensor]:
    """The same with a matrix for each expert in the place of tensors that hold all of a layer.

    Args:
        tensors: of safetensors files, by name.
        family: as config.json calls it.

    Raises:
        WrongShape: gates and ups are not as many.
    """
    stacks = {name: found for name in tensors if (found := _STACK.fullmatch(name))}
    if not stacks:
        return dict(tensors)
    names = names_of(family)
    made: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        found = stacks.get(name)
        if found is not None and len(stored.shape) == 3:
            for matrix in _matrices(stored, found, names):
                made[matrix.name] = matrix
        elif names.block != USUAL.block and (router := _ROUTER.fullmatch(name)):
            known = f"{router['layer']}.{names.block}.gate.weight"
            made[known] = replace(stored, name=known, piece=Piece(name))
        else:
            made[name] = stored
    return made


def _matrices(
    stored: StoredTensor, found: "re.Match[str]", names: ExpertNames
) -> Iterator[StoredTensor]:
    experts, rows, columns = stored.shape
    parts = (names.down,) if found["stack"] == "down" else (names.gate, names.up)
    if rows % len(parts):
        even = (experts, rows + 1, columns)
        raise WrongShape(stored.name, stored.shape, even, "a layer's gates and ups")
    rows //= len(parts)
    suffix = f"weight{found['scales'] or ''}"
    for expert in range(experts):
        for i, part in enumerate(parts):
            name = f"{found['layer']}.{names.block}.experts.{expert}.{part}.{suffix}"
            piece = Piece(stored.name, expert, i * rows)
            yield replace(stored, name=name, shape=(rows, columns), piece=piece)
