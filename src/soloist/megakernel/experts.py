"""The experts of a layer in the kernel: where they lie, and which block reads what of the chosen.

The distinct experts that a round's queries chose are its *slots*, in ascending order. Which they
are the kernel knows only in the round, so the plan says everything by slot. Pure integers.
"""

from dataclasses import dataclass

from soloist.errors import ShapeUnsupported
from soloist.megakernel.limits import CONSUMER_WARPS
from soloist.megakernel.partition import Matrix
from soloist.model.config import Mixture, Router

# A lane of a warp ranks every 32nd expert, in registers.
MOST_EXPERTS = 512
# Bits of a word: chosen experts of eight queries are found among so many.
MOST_CHOSEN = 32


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a layer.

    They lie one after the other, as equally many bytes each: first the tiles of gate_up, each with
    all its steps of columns, then the rows of `down`, those of one block after those of another.

    Attributes:
        router: chooses.
        gate_up: of one expert; a unit is a tile, and belongs to no block.
        down: of one expert; every block has the rows that it owns of the residual stream.
        gates_shared: behind the router's rows lies one more, for the MLP beside the experts.
    """

    router: Router
    gate_up: Matrix
    down: Matrix
    gates_shared: bool = False

    @property
    def blocks(self) -> int:
        """Over how many the work is spread."""
        return self.down.blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert."""
        return self.gate_up.num_bytes + self.down.num_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of all experts."""
        return self.router.num_experts * self.num_bytes

    @property
    def slot_columns(self) -> int:
        """Columns that the activations of a slot take before `down`, padding included."""
        return self.down.padded_columns

    def most_slots(self, queries: int) -> int:
        """Distinct experts that so many queries can choose."""
        return min(self.router.num_experts, queries * self.router.num_chosen)

    def first_tile(self, block: int, slots: int) -> int:
        """Where a block's tiles of gate_up begin, counted over all slots, one after the other."""
        return block * slots * self.gate_up.units // self.blocks

    def tiles(self, block: int, slots: int) -> list[tuple[int, int]]:
        """(slot, tile of the expert) of all tiles of gate_up that a block owns."""
        own = range(self.first_tile(block, slots), self.first_tile(block + 1, slots))
        return [divmod(tile, self.gate_up.units) for tile in own]

    @property
    def tiles_together(self) -> int:
        """Tiles of gate_up of one query that a block's warps add up side by side, one each."""
        tiles = self.router.num_chosen * self.gate_up.units
        return min(CONSUMER_WARPS, -(-tiles // self.blocks))

    @property
    def num_logits(self) -> int:
        """Of a query: one of each expert, then that of the MLP beside them, if it has one."""
        return self.router.num_experts + self.gates_shared

    def router_rows(self, block: int) -> range:
        """Which logits a block makes."""
        count = self.num_logits
        return range(block * count // self.blocks, (block + 1) * count // self.blocks)

    def cuda(self) -> list[str]:
        """CUDA text of what a block has of the router, and of gate_up by the number of slots."""
        logits, tiles = self.num_logits, self.gate_up.units
        return [
            f"static __device__ __forceinline__ u32 {function} {{ return {result}; }}"
            for function, result in (
                ("first_router_row(u32 block)", f"block * {logits}u / {self.blocks}u"),
                (
                    "first_tile(u32 block, u32 slots)",
                    f"block * slots * {tiles}u / {self.blocks}u",
                ),
            )
        ]

    def block_bytes(self, block: int) -> int:
        """What a block streams of the experts of one query, padding included."""
        slots = self.router.num_chosen
        tiles = self.first_tile(block + 1, slots) - self.first_tile(block, slots)
        return tiles * self.gate_up.unit_bytes + slots * self.down.block_bytes(block)

    @property
    def max_block_bytes(self) -> int:
        """The same of the busiest block."""
        return max(self.block_bytes(block) for block in range(self.blocks))


def require_experts(mixture: Mixture) -> None:
    """Refuse what the kernel does not know of mixtures.

    Raises:
        ShapeUnsupported: naming it.
    """
    router, shared = mixture.router, mixture.shared
    checks = [
        (router.num_groups == 1, "a router with groups of experts", "one group"),
        (
            router.num_experts <= MOST_EXPERTS,
            f"{router.num_experts} experts in a layer",
            f"at most {MOST_EXPERTS}",
        ),
        (
            router.num_chosen <= MOST_CHOSEN,
            f"{router.num_chosen} experts for a token",
            f"at most {MOST_CHOSEN}",
        ),
        (not mixture.expert.bias, "experts with biases", "experts without"),
    ]
    if shared is not None:
        neurons = shared.intermediate_size
        checks += [
            (not shared.bias, "shared experts with biases", "shared experts without"),
            (
                shared.activation == "silu",
                f"the activation {shared.activation} of shared experts",
                "silu",
            ),
            (neurons % 8 == 0, f"shared experts of {neurons} neurons", "a multiple of 8"),
        ]
    for fine, given, allowed in checks:
        if not fine:
            raise ShapeUnsupported(given, allowed)
