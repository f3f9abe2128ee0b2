"""The tables of phases: what is read was published before, and every buffer is somebody's."""

from plan.shapes import SMALL, small_plan
from soloist.megakernel.program import EMBED, LAST, LAYER, MASK, PHASES, PRODUCTS, ROUTER


def test_every_phase_reads_what_was_published_before() -> None:
    published = set(EMBED.publishes)
    mixed = (*LAYER[:3], ROUTER, *LAYER[3:])
    for phase in (*mixed, *mixed, *LAST):
        assert {*phase.reads} <= published | {*phase.publishes}, phase.name
        published |= {*phase.publishes}


def test_every_buffer_is_read_and_published() -> None:
    read = {name for phase in PHASES for name in phase.reads}
    assert read == {name for phase in PHASES for name in phase.publishes}


def test_the_buffers_of_a_plan_are_those_of_its_phases() -> None:
    named = {name for phase in PHASES if phase is not ROUTER for name in phase.publishes}
    named -= {"hidden_router", "expert_logits"}  # of mixtures
    on_ranks = {"sums_mid", "sums_in", "logits"}
    assert {*small_plan(SMALL, 7).exchanges.workspace} == named - on_ranks
    # Where blocks have arrived is no data of a phase.
    assert {*small_plan(SMALL, 7, ranks=2).exchanges.workspace} == named | {"arrivals"}


def test_the_operands_of_matrices() -> None:
    operands = {product.name: product.operand for product in PRODUCTS}
    assert operands == {
        "qkv": "hidden_in", "attention_output": "attended", "gate_up": "hidden_mid", "down": "gated"
    }  # fmt: skip
    assert [*small_plan(SMALL, 7).exchanges.operands] == [*operands.values()]


def test_the_ring_brings_every_phase_of_a_layer_something() -> None:
    assert all(bool(phase.product) != phase.streams_pages for phase in LAYER)
    assert not any(phase.streams_pages for phase in (EMBED, *LAST, MASK))
