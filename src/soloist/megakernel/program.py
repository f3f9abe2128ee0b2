"""What a round and its layers are made of: phases in order, their matrices, what they exchange.

The header (the order of a layer's phases in the kernel, and of what its producer streams), kinds of
layers, exchange buffers, the interpreter, the trace and the watchdog's report walk these tables.
Pure data.
"""

from dataclasses import dataclass

from soloist.megakernel.partition import RowOrder
from soloist.model.config import Layer, Mixture


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix that a phase multiplies.

    Attributes:
        name: of its tensor in a layer, without 'layers.N.'; of an expert's without what is before.
        operand: the exchange buffer with the activations that it is multiplied with.
        order: of its rows in the kernel; PAIRED may become FINELY_PAIRED where that is more even.
        joins: products join the residual stream, whose rows stay with their block.
    """

    name: str
    operand: str
    order: RowOrder = RowOrder.NATURAL
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of a block's consumers.

    Attributes:
        name: of the phase and of its CUDA function.
        needs: what it waits for, in words, as the watchdog reports it.
        marks: what lies between the phase's time stamps, in order.
        reads: exchange buffers that other blocks publish.
        publishes: exchange buffers that it writes for other blocks.
        product: its matrix, or None.
        shared: a matrix of the MLP that all tokens take beside experts, in layers with such an MLP:
            is multiplied before `product`.
        streams_pages: the ring brings it pages of the KV cache.
        label: what traces and result files call it.
    """

    name: str
    needs: str
    marks: tuple[str, ...]
    reads: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    product: Product | None = None
    shared: Product | None = None
    streams_pages: bool = False
    label: str = ""


_MULTIPLY = ("wait", "multiply", "finish")
# The residual stream on its way to attention and to the MLP: activations, and sums of squares.
_IN, _MID = ("hidden_in", "squares_in"), ("hidden_mid", "squares_mid")
# Where logits of experts come beside attention_output, see `LayerKind.routes_early`.
_IN_EARLY = (*_IN, "hidden_router")

# A layer of attention and a gated MLP, both behind a norm. The producer streams the matrices and
# pages of the phases in the same order. On ranks products that join the residual are partial sums.
LAYER = (
    Phase(
        "qkv",
        "the residual stream of all blocks, from down of the layer before or from embed",
        _MULTIPLY,
        reads=_IN,
        publishes=("projected",),
        product=Product("qkv", "hidden_in", RowOrder.HEADS),
    ),
    Phase(
        "attention",
        "q, k and v from the blocks that own rows of its KV head, and at long context for partial "
        "results of the head's other splits",
        ("wait", "pages", "store", "merge"),
        reads=("projected", "partial", "partial_stats"),
        publishes=("partial", "partial_stats", "attended"),
        streams_pages=True,
    ),
    Phase(
        "attention_output",
        "attention of all heads, from the blocks that finish it",
        _MULTIPLY,
        reads=("attended", "sums_mid", "hidden_router"),
        publishes=("sums_mid", *_MID, "expert_logits"),
        product=Product("attention_output", "attended", joins=True),
        label="output",
    ),
    Phase(
        "gate_up",
        "the residual stream of all blocks, from attention_output",
        _MULTIPLY,
        reads=_MID,
        publishes=("gated",),
        product=Product("gate_up", "hidden_mid", RowOrder.PAIRED),
    ),
    Phase(
        "down",
        "silu(gate) · up of all blocks",
        _MULTIPLY,
        reads=("gated", "shared_gated", "sums_in"),
        publishes=("sums_in", *_IN_EARLY),
        product=Product("down", "gated", joins=True),
        shared=Product("shared.down", "shared_gated", joins=True),
    ),
)
# In layers with experts, between attention_output and gate_up. Its own weights are vectors. What
# all tokens take streams and is multiplied while the choice is not known.
ROUTER = Phase(
    "router",
    "the residual stream of all blocks, and then their logits of experts",
    ("wait", "multiply", "wait", "choose"),
    reads=(*_MID, "expert_logits"),
    publishes=("expert_logits", "shared_gated"),
    shared=Product("shared.gate_up", "hidden_mid", RowOrder.PAIRED),
)
EMBED = Phase("embed", "no other block", ("embed",), publishes=_IN_EARLY)
# Where lanes become one stream, the head reads `hidden_out` and `squares_out`, which it publishes.
LAST = (
    Phase(
        "head",
        "the residual stream of all blocks, from down of the last layer",
        ("wait", "multiply"),
        reads=_IN,
        publishes=("best", "logits"),
        product=Product("head", "hidden_in"),
    ),
    Phase(
        "choose",
        "the best token of every block",
        ("wait", "choose"),
        reads=("best", "logits"),
    ),
    Phase(
        "conclude",
        "its own cleaner warp and, in block 0, the host to take the last round's tokens",
        ("conclude",),
    ),
)
# Inside of choose, for queries whose tokens a grammar allows or not.
MASK = Phase("mask", "the host to say which tokens the grammar allows next", ())
# All that a block's consumers may be at, in the order of `Phase` in CUDA.
PHASES = (EMBED, *LAYER, *LAST, MASK, ROUTER)
PRODUCTS = tuple(phase.product for phase in LAYER if phase.product is not None)
# Of an MLP beside experts.
SHARED = tuple(phase.shared for phase in (ROUTER, *LAYER) if phase.shared is not None)
_PRODUCTS = {product.name: product for product in (*PRODUCTS, *SHARED)}
# Of layers with experts: what a block multiplies of them depends on the choice.
OF_EXPERTS = ("gate_up", "down")


def tensor_of(layer: Layer, number: int, name: str, expert: int) -> str:
    """The name of a matrix's tensor in a layer of that number; of an expert, if it has some."""
    if isinstance(layer.mlp, Mixture) and name in OF_EXPERTS:
        return f"layers.{number}.experts.{expert}.{name}"
    return f"layers.{number}.{name}"


def phases_of(layer: Layer) -> tuple[Phase, ...]:
    """The phases of a layer, in order."""
    if not isinstance(layer.mlp, Mixture):
        return LAYER
    first = next(i for i, phase in enumerate(LAYER) if phase.name in OF_EXPERTS)
    return (*LAYER[:first], ROUTER, *LAYER[first:])


def has_shared_mlp(layer: Layer) -> bool:
    """All tokens of a layer take an MLP beside the experts that they choose."""
    return isinstance(layer.mlp, Mixture) and layer.mlp.shared is not None


def products_of_phase(phase: Phase, layer: Layer) -> tuple[Product, ...]:
    """The matrices that a phase multiplies in a layer, in the order in which they stream."""
    found = (phase.shared if has_shared_mlp(layer) else None, phase.product)
    return tuple(product for product in found if product is not None)


def products_of(layer: Layer) -> tuple[Product, ...]:
    """The matrices of a layer in the order in which they stream."""
    return tuple(x for phase in phases_of(layer) for x in products_of_phase(phase, layer))


def place_of(tensor: str) -> tuple[int, str]:
    """(layer, name of its `Product`) of the tensor of a layer's matrix, or of some other tensor.

    Of an expert it is that of any other: 'layers.3.experts.5.down' is the `down` of layer 3.
    """
    _, layer, *names = tensor.split(".")
    return int(layer), ".".join(names[2:] if names[0] == "experts" else names)


def matrix_shape(name: str, layer: Layer, hidden_size: int) -> tuple[int, int]:
    """(rows, columns) of a matrix in a layer of these sizes, or of each expert's."""
    attention, neurons = layer.attention, layer.each_mlp.intermediate_size
    attended = attention.num_query_heads * attention.head_dim
    if _PRODUCTS[name] in SHARED:
        assert layer.common_mlp is not None, "an MLP beside experts"
        neurons = layer.common_mlp.intermediate_size
    return {
        "qkv": (attention.qkv_rows, hidden_size),
        "attention_output": (hidden_size, attended),
        "gate_up": (2 * neurons, hidden_size),
        "down": (hidden_size, neurons),
    }[name.removeprefix("shared.")]


def vector_sizes(layer: Layer, hidden_size: int) -> dict[str, int]:
    """fp32 values of a layer's norm weights, biases and router, in the order in which they lie.

    The gate of an MLP beside experts is one row more of the router.
    """
    attention, mlp = layer.attention, layer.mlp
    sizes = {"attention_norm": hidden_size, "mlp_norm": hidden_size}
    if attention.qk_norm:
        sizes |= {"q_norm": attention.head_dim, "k_norm": attention.head_dim}
    if attention.qkv_bias:
        sizes["qkv_bias"] = attention.qkv_rows
    if attention.output_bias:
        sizes["attention_output_bias"] = hidden_size
    if isinstance(mlp, Mixture):
        sizes["router"] = mlp.router.num_experts * hidden_size
        if mlp.gates_shared:
            sizes["shared_gate"] = hidden_size
        if mlp.router.is_corrected:
            sizes["router_correction"] = mlp.router.num_experts
    elif mlp.bias:
        sizes |= {"gate_up_bias": 2 * mlp.intermediate_size, "down_bias": hidden_size}
    return sizes
