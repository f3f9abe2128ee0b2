"""Small mixtures of experts, and plans of them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from interpreter.models import CONTEXT
from soloist.megakernel.tuning import HOPPER
from soloist.model.config import Attention, Layer, Mixture, Mlp, ModelConfig, Router
from soloist.model.rope import Rope

_NORMED = Attention(4, 2, 32, qk_norm=True)


@contextmanager
def _tuned(**figures: bool | int | None) -> Iterator[None]:
    before = {name: getattr(HOPPER, name) for name in figures}
    for name, value in figures.items():
        object.__setattr__(HOPPER, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(HOPPER, name, value)


def routing_early(*, early: bool) -> AbstractContextManager[None]:
    """Plans that are read meanwhile have logits of experts beside attention_output, or not."""
    return _tuned(routes_early=early)


def _model(
    *mlps: Mlp | Mixture, hidden_size: int = 72, attention: Attention = _NORMED
) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe", hidden_size=hidden_size, vocab_size=203, context_tokens=CONTEXT,
        norm_epsilon=1e-5, layers=tuple(Layer(attention, mlp) for mlp in mlps),
        rope=Rope(10_000.0), tied_head=False,
    )  # fmt: skip


_USUAL = Mixture(Router(16, 3, normalises=True), Mlp(40))
MIXTURES: dict[str, ModelConfig] = {
    "softmax": _model(_USUAL, _USUAL),
    # Experts are few enough for all of them to be chosen, and as many as blocks or fewer.
    "mixtral": _model(*[Mixture(Router(4, 2, normalises=True), Mlp(136))] * 2),
    "not normalised": _model(Mixture(Router(40, 5), Mlp(32)), hidden_size=600),
    "corrected sigmoids": _model(
        *[Mixture(Router(16, 4, "sigmoid", is_corrected=True, normalises=True, scale=1.5), Mlp(32))]
        * 2
    ),
    # The kinds take turns; experts of two sizes, one of which wants two steps of columns.
    "some layers dense": _model(
        Mlp(136), _USUAL, replace(_USUAL, expert=Mlp(520)), Mlp(136), _USUAL
    ),
    # Every block has one tile of `down`; experts end in half a step, which may be the only one.
    "half steps": _model(
        replace(_USUAL, expert=Mlp(200)), replace(_USUAL, expert=Mlp(768)), hidden_size=112
    ),
}
# As many experts are chosen as a block has warps, and a block's rows are one tile.
_EIGHT = Mixture(Router(20, 8, normalises=True), Mlp(200))
MIXTURES["eight slots"] = _model(_EIGHT, replace(_EIGHT, expert=Mlp(768)), hidden_size=112)
# In 16 bits a slot of the first layer fills no more than one of the ring, on two ranks one of the
# second; sums of all slots have room where queries lie, as these are wide.
MIXTURES["eight slots, wide heads"] = _model(
    *[replace(_EIGHT, expert=Mlp(neurons)) for neurons in (320, 768)],
    hidden_size=112, attention=replace(_NORMED, head_dim=128),
)  # fmt: skip
# Beside experts an MLP that all tokens take: with a gate, or without one after a dense layer. One
# has as many neurons as an expert, one so few that some blocks have no rows of its gate and up, and
# one several groups of tiles.
SHARED: Mapping[str, ModelConfig] = {
    "shared, gated": _model(*[replace(_USUAL, shared=Mlp(72), gates_shared=True)] * 2),
    "shared after a dense layer": _model(
        Mlp(136),
        *[
            Mixture(
                Router(16, 4, "sigmoid", is_corrected=True, normalises=True, scale=1.5), Mlp(32),
                shared=Mlp(32),
            )
        ] * 2,
    ),
    "shared beside eight slots": _model(
        *[replace(_EIGHT, shared=Mlp(72), gates_shared=True)] * 2, hidden_size=112
    ),
    "shared of several sizes": _model(
        replace(_USUAL, shared=Mlp(16)),
        _USUAL,
        replace(_USUAL, shared=Mlp(1560), gates_shared=True),
        hidden_size=96,
    ),
}  # fmt: skip
MIXTURES |= SHARED
SMS = 7
# Prompts are multiplied by experts as they are packed: columns are multiples of 32, of each of two
# ranks too. With the SMs that let one end in half a step.
OF_WHOLE_WORDS: Mapping[str, tuple[ModelConfig, int]] = {
    "whole words": (
        _model(
            Mlp(136),
            replace(_USUAL, expert=Mlp(64)),
            replace(_USUAL, expert=Mlp(96)),
            hidden_size=64,
        ),
        SMS,
    ),
    "half steps, whole words": (
        _model(replace(_USUAL, expert=Mlp(192)), replace(_USUAL, expert=Mlp(768)), hidden_size=96),
        6,
    ),
}


def wide_experts(neurons: int) -> ModelConfig:
    """So that ranks have whole groups of columns of `down`."""
    config = MIXTURES["softmax"]
    mixture = replace(_USUAL, expert=Mlp(neurons))
    layers = tuple(replace(layer, mlp=mixture) for layer in config.layers)
    return replace(config, layers=layers, hidden_size=256)


def with_shared_mlp(config: ModelConfig, *, gated: bool = True) -> ModelConfig:
    """With an MLP as large as two experts beside those of each mixture."""

    def with_one(layer: Layer) -> Layer:
        assert isinstance(layer.mlp, Mixture), "a mixture"
        shared = Mlp(2 * layer.mlp.expert.intermediate_size)
        return replace(layer, mlp=replace(layer.mlp, shared=shared, gates_shared=gated))

    return replace(config, layers=tuple(map(with_one, config.layers)))


def qwen15_moe_a27b() -> ModelConfig:
    """An MLP with a gate, as large as four experts."""
    mixture = Mixture(Router(60, 4), Mlp(1408), shared=Mlp(5632), gates_shared=True)
    return ModelConfig(
        family="qwen2_moe", hidden_size=2048, vocab_size=151936, context_tokens=8192,
        norm_epsilon=1e-6, layers=(Layer(Attention(16, 16, 128, qkv_bias=True), mixture),) * 24,
        rope=Rope(1_000_000.0), tied_head=False,
    )  # fmt: skip


def glm_45_air() -> ModelConfig:
    """A dense layer, then an MLP as large as an expert beside 128; 12 query heads to a KV head."""
    router = Router(
        128, 8, "sigmoid", is_corrected=True, normalises=True, least_sum=1e-20, scale=1.0
    )
    mixture, attention = Mixture(router, Mlp(1408), shared=Mlp(1408)), Attention(96, 8, 128)
    layers = (Mlp(10944), *[mixture] * 45)
    return ModelConfig(
        family="glm4_moe", hidden_size=4096, vocab_size=151552, context_tokens=8192,
        norm_epsilon=1e-5,
        layers=tuple(Layer(replace(attention, qkv_bias=True), mlp) for mlp in layers),
        rope=Rope(1_000_000.0, share=0.5), tied_head=False,
    )  # fmt: skip


def mixtral_8x7b() -> ModelConfig:
    """In four of its layers."""
    mixture = Mixture(Router(8, 2, normalises=True), Mlp(14336))
    return ModelConfig(
        family="mixtral", hidden_size=4096, vocab_size=32000, context_tokens=4096,
        norm_epsilon=1e-5, layers=(Layer(Attention(32, 8, 128), mixture),) * 4,
        rope=Rope(1_000_000.0), tied_head=False,
    )  # fmt: skip
