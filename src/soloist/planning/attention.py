"""Kinds of attention in figures: their matrices, and what they keep of a position. Pure.

These are the kinds of models that Soloist plans for and does not run. Biases are too small to
matter, and so are the norms of heads.
"""

from dataclasses import dataclass

from soloist.errors import MissingField
from soloist.model.reading import Fields
from soloist.planning.model import Cache, grouped_cache

Matrices = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's.

    Attributes:
        matrices: name, rows and columns of each.
        caches: what it keeps of each position.
        state_values: fp32 numbers that it keeps whatever the context is.
    """

    matrices: Matrices
    caches: tuple[Cache, ...]
    state_values: int = 0


def read_nullable(fields: Fields, name: str) -> int:
    """A whole number; 0 where the file says null, which is not the same as saying nothing.

    Raises:
        ConfigError: the field is missing or of the wrong type.
    """
    if not fields.names(name):
        raise MissingField(fields.file, name, "a whole number, or null for none")
    return int(fields.integer(name, 0, minimum=0))


def read_grouped(fields: Fields, window: int | None = None, *, gated: bool = False) -> Attention:
    """Q query heads over K heads of keys and values; gated, every query head has a gate beside it.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    dim = fields.integer("head_dim", hidden // heads)
    rows = (heads * (2 if gated else 1) + 2 * kv_heads) * dim
    matrices = (("qkv", rows, hidden), ("attention_output", hidden, heads * dim))
    return Attention(matrices, (grouped_cache(heads, kv_heads, dim, window),))


def read_latent(fields: Fields, window: int | None = None) -> Attention:
    """Multi-head latent attention: one latent and one rotated key of each position, for all heads.

    A step multiplies its queries into the latents' space and attends there, so what it needs for a
    position is 2 · Q · (2 · latent + rotated). A prompt's passes unfold keys and values instead,
    which costs less for many queries.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    latent, rotated = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    plain, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    compressed = read_nullable(fields, "q_lora_rank")
    fields.ignore("head_dim", "qk_head_dim", "num_key_value_heads")  # follow from the others
    matrices = (
        ("latents", compressed + latent + rotated, hidden),
        ("query", heads * (plain + rotated), compressed or hidden),
        ("key_value", heads * (plain + value), latent),
        ("attention_output", hidden, heads * value),
    )
    cache = Cache(
        values=latent + rotated,
        flops=2 * heads * (2 * latent + rotated),
        prompt_flops=2 * heads * (plain + rotated + value),
        heads=1,
        window=window,
    )
    return Attention(matrices, (cache,))


def read_indexed(fields: Fields) -> Attention:
    """Latent attention to the `index_topk` positions that small keys of their own say matter most.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    attention = read_latent(fields, fields.integer("index_topk"))
    heads, dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    hidden = fields.integer("hidden_size")
    matrices = (
        ("index_query", heads * dim, fields.integer("q_lora_rank")),
        ("index_key", dim + heads, hidden),
    )
    index = Cache(dim, 2 * heads * dim, 2 * heads * dim, heads=1)
    return Attention((*attention.matrices, *matrices), (*attention.caches, index))


def read_linear(fields: Fields) -> Attention:
    """Gated delta rule: state for each value head, and a convolution's last inputs.

    Raises:
        ConfigError: a field is missing or of the wrong type.
    """
    hidden, kernel = fields.integer("hidden_size"), fields.integer("linear_conv_kernel_dim")
    key_heads, heads = (fields.integer(f"linear_num_{w}_heads") for w in ("key", "value"))
    key_dim, dim = (fields.integer(f"linear_{w}_head_dim") for w in ("key", "value"))
    values, convolved = heads * dim, 2 * key_heads * key_dim + heads * dim
    matrices = (
        ("qkv", convolved + values, hidden),  # with a gate for each value
        ("rates", 2 * heads, hidden),
        ("convolution", convolved, kernel),
        ("attention_output", hidden, values),
    )
    return Attention(matrices, (), heads * key_dim * dim + convolved * (kernel - 1))
