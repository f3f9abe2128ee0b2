"""What of a model's maths the decode kernel and prefill do not know, and refuse. Pure."""

from soloist.errors import ShapeUnsupported
from soloist.megakernel.experts import require_experts
from soloist.model.config import Mixture, ModelConfig
from soloist.model.dtype import Dtype
from soloist.model.kv_format import KvFormat

# Where mixtures of experts run. Builds for other architectures have run nowhere and spill registers
# with eight queries, and on sm_80 one of int4 has too much shared memory.
EXPERTS_ARCH = "sm_90a"


def require_architecture(model: ModelConfig, arch: str) -> None:
    """Refuse what only the reference runs on GPUs of an architecture.

    Raises:
        ShapeUnsupported: naming it.
    """
    if model.mixtures and arch != EXPERTS_ARCH:
        allowed = f"{EXPERTS_ARCH}, which is Hopper: H100 and H200"
        raise ShapeUnsupported(f"a mixture of experts on {arch}", allowed)


def require_kv(stored: KvFormat, dtype: Dtype) -> None:
    """Refuse keys and values in codes where only the reference stores them.

    Args:
        stored: how.
        dtype: of activations. Shares times scales have a wider range than fp16.

    Raises:
        ShapeUnsupported: naming what there is instead.
    """
    if not stored.is_plain and dtype is not Dtype.BF16:
        raise ShapeUnsupported(f"keys and values in {stored.name} beside {dtype.value}", "bf16")


def require_maths(model: ModelConfig) -> None:
    """Refuse what only the reference computes.

    Raises:
        ShapeUnsupported: naming it.
    """
    checks = [
        (model.embedding_scale == 1, "a scale of embeddings", "embeddings as they are stored"),
        (model.logit_scale == 1, "a scale of logits", "logits as the head gives them"),
        (model.norm_offset == 0, "norms that are stored less 1", "norms as they are stored"),
    ]
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(mlp, Mixture):
            require_experts(mlp)
        checks += [
            (layer.norms_inputs, "layers without norms before attention and MLP", "such norms"),
            (not layer.norms_outputs, "norms after attention and MLP", "norms before them"),
            (
                not attention.qk_norm_joins_heads,
                "norms over all heads of queries and keys",
                "norms of each head",
            ),
            (
                attention.scale == attention.head_dim**-0.5,
                f"attention scores times {attention.scale:g}",
                f"{attention.head_dim**-0.5:g}, the root of a head's size",
            ),
            (attention.own_rope is None, "layers with a rope of their own", "one for all layers"),
            (
                layer.each_mlp.activation == "silu",
                f"the activation {layer.each_mlp.activation}",
                "silu",
            ),
        ]
    for fine, given, allowed in checks:
        if not fine:
            raise ShapeUnsupported(given, allowed)
