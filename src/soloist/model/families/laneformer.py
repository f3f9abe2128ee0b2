"""`laneformer`: Kog's Laneformer with delayed tensor parallelism (model_type laneformer_tp too).

Generic defaults of the training code are not taken over: a field that decides logits and is absent
is refused. Both spellings of the sliding layers and of communication are read.
"""

from soloist.errors import MissingField, WrongType
from soloist.model.config import Attention, Lanes, Layer, Mlp, ModelConfig
from soloist.model.families.dense import extended_context, read_heads, read_rope
from soloist.model.reading import Fields
from soloist.model.tensors import Source, TensorSpec


def read(fields: Fields) -> ModelConfig:
    """Sizes, lanes, sliding layers and interleaved rope."""
    # Training or framework switches without an effect on the function.
    fields.ignore("multiple_of", "depth_init", "use_flex_attn", "attn_mask_type")
    fields.only("hidden_act", "silu")
    hidden = fields.integer("hidden_size")
    fields.integer("num_key_value_heads")
    query_heads, kv_heads, head_dim = read_heads(fields, hidden)
    ffn = fields.integer("intermediate_size")
    lanes = _read_lanes(fields)
    for name, count in (
        ("num_attention_heads", query_heads),
        ("num_key_value_heads", kv_heads),
        ("intermediate_size", ffn),
    ):
        if count % lanes.num_lanes:
            raise WrongType(fields.file, name, count, f"a multiple of {lanes.num_lanes} lanes")
    rope = read_rope(fields, None, head_dim, interleaved=True)
    return ModelConfig(
        family=fields.family,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        context_tokens=extended_context(fields.integer("max_position_embeddings"), rope.scaling),
        norm_epsilon=fields.number("norm_eps"),
        layers=tuple(
            Layer(Attention(query_heads, kv_heads, head_dim, window=window), Mlp(ffn))
            for window in _read_windows(fields)
        ),
        rope=rope,
        tied_head=fields.flag("tie_word_embeddings"),
        lanes=lanes,
    )


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Lane-first shards: a lane's share of a matrix is one contiguous slice."""
    lanes = config.lanes
    assert lanes is not None, "a laneformer configuration has lanes"
    hidden, vocab, num = config.hidden_size, config.vocab_size, lanes.num_lanes

    def one(ours: str, theirs: str, *shape: int) -> TensorSpec:
        return TensorSpec(ours, (Source(theirs, shape),))

    def norm(ours: str, theirs: str) -> TensorSpec:
        if lanes.shared_norm_scales:
            return one(ours, f"{theirs}.weight", hidden)
        return one(ours, f"{theirs}.scale", num, hidden)

    specs = [one("embedding", "model.tok_embeddings.weight", vocab, hidden)]
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        a = layer.attention
        queries = a.num_query_heads * a.head_dim // num
        keys = a.num_kv_heads * a.head_dim // num
        ffn = layer.dense_mlp.intermediate_size // num
        qkv = {"wq": queries, "wk": keys, "wv": keys}
        specs += [
            norm(f"{ours}attention_norm", f"{theirs}attention_norm"),
            TensorSpec(
                f"{ours}qkv",
                tuple(
                    Source(f"{theirs}attention.{n}.weight", (num, r, hidden))
                    for n, r in qkv.items()
                ),
                axis=1,
            ),
            one(f"{ours}attention_output", f"{theirs}attention.wo.weight", num, hidden, queries),
            norm(f"{ours}mlp_norm", f"{theirs}ffn_norm"),
            TensorSpec(
                f"{ours}gate_up",
                tuple(
                    Source(f"{theirs}feed_forward.{n}.weight", (num, ffn, hidden))
                    for n in ("w1", "w3")
                ),
                axis=1,
            ),
            one(f"{ours}down", f"{theirs}feed_forward.w2.weight", num, hidden, ffn),
        ]
    specs.append(norm("final_norm", "model.norm"))
    if not config.tied_head:
        specs.append(_head(config, lanes))
    return tuple(specs)


def _head(config: ModelConfig, lanes: Lanes) -> TensorSpec:
    hidden, vocab, num = config.hidden_size, config.vocab_size, lanes.num_lanes
    match lanes.head:
        case "replicate":
            return TensorSpec("head", (Source("lm_head.weight", (vocab, hidden)),))
        case "vocab_parallel":
            return TensorSpec("head", (Source("lm_head.weight", (num, vocab // num, hidden)),))
        case "lane":
            return TensorSpec("head", (Source("lm_head.linear.weight", (vocab, num * hidden)),))


def _read_lanes(fields: Fields) -> Lanes:
    num_lanes = fields.integer("num_lanes")
    head = fields.choice("lm_head_type", ("replicate", "vocab_parallel", "lane"))
    if head == "vocab_parallel" and fields.integer("vocab_size") % num_lanes:
        raise WrongType(
            fields.file, "vocab_size", fields.integer("vocab_size"), f"a multiple of {num_lanes}"
        )
    sum_before_norm = fields.flag("pre_norm_lane_agg")
    if sum_before_norm and head != "replicate":
        raise fields.unsupported("pre_norm_lane_agg", True, "false unless the head is 'replicate'")
    shared_norm_scales = fields.flag("replicated_rmsn_scale")
    if sum_before_norm and not shared_norm_scales:
        raise fields.unsupported(
            "replicated_rmsn_scale", False, "true where pre_norm_lane_agg leaves one stream to norm"
        )
    if head != "replicate" and fields.flag("tie_word_embeddings"):
        raise fields.unsupported(
            "tie_word_embeddings", True, "false unless the head is 'replicate'"
        )
    if "use_comm" in fields:
        attention_comm = mlp_comm = fields.flag("use_comm")
    else:
        attention_comm = fields.flag("use_attention_comm")
        mlp_comm = fields.flag("use_mlp_comm")
    return Lanes(
        num_lanes=num_lanes,
        delay_layers=fields.integer("broadcast_delay"),
        early_sum=fields.flag("use_early_comm"),
        attention_comm=attention_comm,
        mlp_comm=mlp_comm,
        shared_norm_scales=shared_norm_scales,
        head=head,
        sum_before_norm=sum_before_norm,
    )


def _read_windows(fields: Fields) -> list[int | None]:
    """Window per layer from `swa_layers` or from `sliding_window_n_layers`.

    The latter means the first n layers for n > 0 and the last |n| for n < 0, less those that
    `unclamped_layers` lists.
    """
    field = "swa_layers"
    num_layers = fields.num_layers()
    window = fields.integer("sliding_window", None)
    listed = fields.integers("swa_layers", None)
    if listed is None and window is not None and "sliding_window_n_layers" not in fields:
        raise MissingField(fields.file, field, "the list of layers that sliding_window is for")
    if listed is None:
        field = "sliding_window_n_layers"
        count = fields.integer(field, 0, minimum=-num_layers)
        exempt = fields.integers("unclamped_layers", [])
        first = 0 if count >= 0 else num_layers + count
        listed = [i for i in range(first, first + abs(count)) if i not in exempt]
    if any(i >= num_layers for i in listed):
        raise WrongType(fields.file, field, listed, f"layer numbers below {num_layers}")
    if listed and window is None:
        raise MissingField(fields.file, "sliding_window", "a whole number of at least 1")
    return [window if i in listed else None for i in range(num_layers)]
