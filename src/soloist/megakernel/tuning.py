"""What was weighed on GPUs: figures that the planner takes as they stand, by architecture. Pure.

The experiments behind the figures are in docs/experiments/ (stream, attention, machine code).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices that change speed, and some of them rounding, but never what is computed.

    Attributes:
        copies_in_flight: of 16 KB, that a block has asked for. 32 KB reach 93 % of the bandwidth
            and leave the L2 as fast as if it had nothing to do, 48 KB 98 % and twice the time; more
            only wait, and what blocks exchange waits with them.
        waiting_copies_in_flight: the same of quantised matrices while a block waits for others. Not
            of blocks that stream more than `waiting_layer_bytes` of a layer: memory that rests for
            them has no time to make up for it.
        waiting_layer_bytes: see above.
        pausing_copies_in_flight: the same of mixtures, whose experts come after a wait, and of
            super-blocks, which wait for instructions: while a block waits for others, and while it
            multiplies.
        few_copies_in_flight: of blocks that stream at most `few_layer_bytes` of a layer. They wait
            for each other most of the time, and gain more by quick exchanges.
        few_layer_bytes: see above.
        few_waiting_copies_in_flight: of such blocks while they wait for others, with one query and
            weights of 4 bits. Weights of more bits would come too late.
        several_copies_in_flight: with several queries of weights of 4 bits, on one GPU. Multiplies
            take longer than their weights do, and every block reads the activations of all queries
            from the L2.
        several_expect_early: of such weights, a slot's bytes are expected before it is the turn of
            their copy, which takes fewer instructions then. One query loses by it.
        several_page_slots: with such weights, slots of KV pages that a block attends to before it
            gives them back; at most two thirds of the ring, at least half. More leave the weights
            of attention_output no room.
        several_rest_cycles: for how long blocks that do not attend ask the L2 for nothing while
            others do, with such weights and more than `few_layer_bytes` of a layer.
        several_few_rows: with such weights and heads of 128 values, attention has code of its own
            for one query's rows.
        elects_lane: on one GPU, with weights of 8 bits and with several queries of 4 bits, the lane
            that asks for copies is elected right there: the compiler makes half as many
            instructions of a copy then. Mixtures lose by it.
        few_pausing_copies_in_flight: the same of quantised mixtures with one query, while a block
            waits and while it multiplies. What they wait for is a choice of experts, and then the
            memory.
        ranks_copies_in_flight: ranks wait for each other, too, and then hurry: copies while a third
            of the ring is free at most, while two thirds are, and beyond.
        few_ranks_copies_in_flight: the same for at most `few_ranks_layer_bytes`, but not for lanes,
            which do not wait for sums.
        few_ranks_layer_bytes: see above.
        ranks_experts_copies_in_flight: the same of mixtures with one query, which wait for a choice
            of experts, and then for the memory.
        page_copies_in_flight: of KV pages where a block serves several groups of columns.
        fetch_slots: slots behind those of a full ring that come to the L2 meanwhile, where blocks
            of several GPUs stream at most `fetch_layer_bytes` of a layer: they wait for each other
            with a full ring, and the stream disturbs them less, the more evenly it comes.
        fetch_cycles: from one such slot to the next, which is the memory's pace.
        fetch_layer_bytes: see above.
        unrolled_tile_steps: tiles · steps of a multiply that are unrolled together: enough to have
            activations in flight, few enough for the instruction cache. Twice as many where fewer
            steps of quantised weights fill no slots.
        max_depth: steps of activations in flight, at most.
        quantized_max_depth: the same of quantised weights.
        several_quantized_depth: the same of quantised weights in builds for several queries. Large
            layers have many tiles, and with more steps the code of a layer no longer fits the 128
            KB of an SM's instruction cache.
        few_several_quantized_depth: the same of blocks that stream at most `few_layer_bytes` of a
            layer.
        byte_steps_at_once: steps of weights in 8 bits whose activations of one query are converted
            at once: few are multiplied sooner, before all blocks have finished theirs, and take
            less shared memory.
        head_group_tiles: tiles of the head whose sums a warp keeps at once, at most.
        multiply_registers: of a consumer thread, for all but a multiply's sums.
        tile_registers: for the sums of one tile.
        quantized_group_tiles: tiles of a quantised gate_up whose sums a warp keeps at once, at
            most: scales and digits need registers, too.
        max_chains: sums of a tile that a warp adds to side by side.
        batch_slots: slots that a consumer warp takes before it gives one back.
        few_quantized_batch_slots: slots of quantised weights that it takes together with one query,
            of blocks that stream at most `few_layer_bytes` of a layer, on one GPU.
        experts_release_late: of quantised mixtures with one query, slots are given back after the
            multiply that follows their loads: a warp waits for no load before it needs it, and the
            ring has the slot later, which costs more where blocks wait for the memory. Not beside
            an MLP that all tokens take, where registers spill.
        several_release_late: the same with several queries, of integers without zeros; others spill
            registers.
        several_short_reductions: with several queries of weights of 4 bits, warps add up their sums
            in less room, in more parts, where the ring has a slot more then.
        early_slots: slots whose weights wait in registers while activations are on their way.
        unsplit_bytes: keys and values up to which one block serves a query of one KV head: it
            saves merging partial results, and they stream while the block waits for others anyway.
        ranks_split_positions: that a split has at least on several GPUs, whose blocks stream little
            else.
        rotation_layers: consecutive layers in which a split has the same block. On one GPU the
            pages that a block streams have to go round at once.
        ranks_rotation_layers: the same on several, which wait for pages more than they stream
            them: code that is at hand is quicker.
        chunk_pages: pages that go to the same split: fewer partial results to merge.
        max_splits: blocks that share the cache of one KV head, at most.
        paired_warp_tiles: of attention's rows, that a warp takes where heads have up to 64 values.
        coded_paired_dim: up to so many values where keys and values are codes.
        routes_early: routers multiply what attention gives, beside attention_output, by a product
            of both matrices, so that experts stream one exchange earlier.
        has_attention_blocks: SMs that have no weights of a mixture attend to a round's only query,
            as long as one block serves a KV head's cache. Its pages are there before q, k and v
            are, and no block with weights is late for what follows.
    """

    copies_in_flight: int = 3
    waiting_copies_in_flight: int = 2
    waiting_layer_bytes: int = 1024 * 1024
    pausing_copies_in_flight: tuple[int, int] = (2, 4)
    few_copies_in_flight: int = 2
    few_layer_bytes: int = 512 * 1024
    few_waiting_copies_in_flight: int = 1
    several_copies_in_flight: int = 2
    several_expect_early: bool = True
    several_page_slots: int = 8
    several_rest_cycles: int = 7000
    several_few_rows: bool = True
    elects_lane: bool = True
    few_pausing_copies_in_flight: tuple[int, int] = (6, 6)
    ranks_copies_in_flight: tuple[int, int, int] = (2, 3, 4)
    few_ranks_copies_in_flight: tuple[int, int, int] = (2, 2, 3)
    few_ranks_layer_bytes: int = 1024 * 1024
    ranks_experts_copies_in_flight: tuple[int, int, int] = (3, 3, 3)
    page_copies_in_flight: int = 3
    fetch_slots: int = 8
    fetch_cycles: int = 800
    fetch_layer_bytes: int = 256 * 1024
    unrolled_tile_steps: int = 16
    max_depth: int = 8
    quantized_max_depth: int = 8
    several_quantized_depth: int = 2
    few_several_quantized_depth: int = 4
    byte_steps_at_once: int = 4
    head_group_tiles: int = 8
    multiply_registers: int = 120
    tile_registers: int = 4
    quantized_group_tiles: int = 24
    max_chains: int = 4
    batch_slots: int = 2
    few_quantized_batch_slots: int = 2
    experts_release_late: bool = True
    several_release_late: bool = True
    several_short_reductions: bool = True
    early_slots: int = 4
    unsplit_bytes: int = 192 * 1024
    ranks_split_positions: int = 128
    rotation_layers: int = 1
    ranks_rotation_layers: int = 4
    chunk_pages: int = 2
    max_splits: int = 64
    paired_warp_tiles: int = 2
    coded_paired_dim: int = 128
    routes_early: bool = True
    has_attention_blocks: bool = True


HOPPER = Tuning()
# Kernels were only compiled for these: nobody has seen whether more sums and slots are worth their
# registers.
NEWER = replace(
    HOPPER,
    max_chains=2,
    batch_slots=1,
    few_quantized_batch_slots=1,
    few_waiting_copies_in_flight=2,
    several_expect_early=False,
    several_page_slots=0,
    several_rest_cycles=0,
    several_few_rows=False,
    elects_lane=False,
    experts_release_late=False,
    several_release_late=False,
    several_short_reductions=False,
    quantized_max_depth=2,
    quantized_group_tiles=4,
    coded_paired_dim=64,
    has_attention_blocks=False,
)
# And a warp cannot pass registers on.
OLDER = replace(NEWER, fetch_slots=0, early_slots=0, paired_warp_tiles=1)
