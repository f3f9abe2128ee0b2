"""Every dense family against transformers: prefill, uneven chunks and step by step."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from reference.compare import assert_close
from reference.oracle import Case, build, load, oracle_logits, prompt, run, save
from soloist.reference.device import Reference

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def yarn(**fields: object) -> dict[str, object]:
    return {"rope_parameters": {**YARN, **fields}}


def long(pairs: int, original: int, **rules: object) -> dict[str, object]:
    """LongRoPE: the tests' contexts are not longer than the original one, or all of them are."""
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.25 * i for i in range(pairs)],
            "long_factor": [1.5 + 0.75 * i for i in range(pairs)],
            **rules,
        },
        "original_max_position_embeddings": original,
    }


MHA = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
GQA = {"num_attention_heads": 10, "num_key_value_heads": 2, "hidden_size": 40, "vocab_size": 97}
MQA = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 72}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}

CASES = [
    Case("mha", "llama", MHA),
    Case("gqa-tied-llama3", "llama", {
        **GQA, "tie_word_embeddings": True, "rope_parameters": LLAMA3,
    }),
    Case("mqa-biases-linear", "llama", {
        **MQA, "attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR,
    }, sharded=True),
    Case("dynamic", "llama", {**GQA, "rope_parameters": DYNAMIC}),
    Case("old-dynamic", "llama", {**GQA, "rope_parameters": DYNAMIC}, old_rope=True),
    Case("old-llama3", "llama", {**GQA, "rope_parameters": LLAMA3, "head_dim": 16}, old_rope=True),
    Case("old-linear", "llama", {**MHA, "rope_parameters": LINEAR}, old_rope=True, sharded=True),
    Case("old-default", "llama", {**MHA, "head_dim": 10}, old_rope=True),
    Case("yarn", "llama", {**MHA, "head_dim": 32, **yarn()}),
    Case("yarn-mscale", "llama", {**MHA, "head_dim": 32, **yarn(mscale=1.3, mscale_all_dim=0.7)}),
    Case("yarn-only-mscale", "llama", {**MHA, "head_dim": 32, **yarn(mscale=1.3)}),
    Case("yarn-attention-factor", "llama", {**MHA, "head_dim": 32, **yarn(attention_factor=1.21)}),
    Case("yarn-untruncated", "llama", {**MHA, "head_dim": 32, **yarn(truncate=False)}),
    Case("yarn-betas", "llama", {
        **MHA, "head_dim": 32, **yarn(beta_fast=9.0, beta_slow=2.5),
    }, old_rope=True),
    Case("window", "mistral", {**GQA, "sliding_window": 16}),
    Case("no-window", "mistral", {**MQA, "sliding_window": None, "head_dim": 20}, sharded=True),
    Case("tied-yarn", "mistral", {
        **MHA, "sliding_window": 300, "tie_word_embeddings": True, **yarn(),
    }),
    Case("plain", "qwen2", MHA),
    Case("tied-yarn", "qwen2", {**GQA, "tie_word_embeddings": True, **yarn()}, old_rope=True),
    Case("upper-window", "qwen2", {**MQA, **WINDOW, "max_window_layers": 1}, sharded=True),
    Case("listed-window", "qwen2", {
        **GQA, **WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    Case("head-dim", "qwen3", {**GQA, "head_dim": 18}),
    Case("tied-biases-yarn", "qwen3", {
        **MHA, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True, **yarn(),
    }),
    Case("upper-window", "qwen3", {**MQA, "head_dim": 8, **WINDOW, "max_window_layers": 2}),
    Case("listed-window", "qwen3", {
        **MQA, "head_dim": 14, **WINDOW, "sliding_window": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }, old_rope=True, sharded=True),
    Case("default-interval", "smollm3", {**GQA, "num_hidden_layers": 5}),
    Case("untied-biases", "smollm3", {
        **MHA, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "no_rope_layers": [0, 1, 0],
    }, sharded=True),
    Case("window-without-rope", "smollm3", {**MQA, **WINDOW, "no_rope_layer_interval": 2}),
    Case("listed-window-yarn", "smollm3", {
        **MQA, **WINDOW, "no_rope_layers": [1, 0, 1],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **yarn(),
    }, old_rope=True),
    Case("plain", "phi3", GQA),
    Case("partial-window", "phi3", {
        **MQA, "sliding_window": 16, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        },
    }, sharded=True),
    Case("short-factors", "phi3", {**MHA, "head_dim": 8, **long(4, 512, factor=16.0)}),
    Case("partial-short-factors", "phi3", {
        **MHA, **long(3, 512, attention_factor=1.3, partial_rotary_factor=0.75),
    }, old_rope=True),
    Case("short-factors", "llama", {**GQA, **long(2, 512, factor=4.0)}),
    Case("text", "mistral3", {**GQA, "head_dim": 8, "sliding_window": None}, sharded=True),
    Case("tied-window", "mistral3", {
        **MHA, "head_dim": 8, "sliding_window": 16, "tie_word_embeddings": True,
    }),
    Case("multipliers", "granite", {
        **GQA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.4, "logits_scaling": 8.0, "tie_word_embeddings": True,
    }),
    Case("biases-linear", "granite", {
        **MHA, "attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR,
        "residual_multiplier": 1.7, "logits_scaling": 0.3, "rms_norm_eps": 1e-3,
    }, sharded=True),
    Case("mha", "olmo2", MHA),
    Case("gqa-biases-yarn", "olmo2", {
        **GQA, "attention_bias": True, "head_dim": 8, **yarn(),
    }, old_rope=True),
    Case("biases", "glm", {**GQA, "head_dim": 8}),
    Case("no-biases", "glm4", {**MQA, "head_dim": 12, "attention_bias": False}),
    Case("biases-tied", "glm4", {
        **MHA, "head_dim": 20, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.7,
        },
    }, sharded=True),
    Case("local-and-global", "gemma3_text", {
        **GQA, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 5,
        "num_hidden_layers": 7,
    }),
    Case("untied-linear-biases", "gemma3_text", {
        **MHA, "head_dim": 12, "sliding_window": 3, "tie_word_embeddings": False,
        "attention_bias": True, "query_pre_attn_scalar": 144,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }, sharded=True),
    Case("text", "gemma3", {
        **MHA, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }),
]  # fmt: skip


def random_case(seed: int) -> Case:
    """Any family, any sizes, any rope."""
    draw = random.Random(seed)
    family = draw.choice(
        [
            *("llama", "mistral", "qwen2", "qwen3", "smollm3"),
            *("phi3", "mistral3", "granite", "olmo2", "glm", "glm4", "gemma3_text", "gemma3"),
        ]
    )
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3, 5])
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * draw.choice([4, 6, 10]),
        "head_dim": 2 * draw.randint(2, 12),
        "intermediate_size": draw.randint(9, 70),
        "num_hidden_layers": draw.randint(1, 4),
        "vocab_size": draw.randint(40, 130),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-5, 1e-6, 1e-3]),
        "rope_parameters": draw.choice(
            [None, {"rope_type": "default", "rope_theta": 777.0}, LLAMA3, LINEAR, YARN]
        ),
    }
    if family in {"llama", "qwen3", "smollm3", "granite", "olmo2", "glm", "glm4", "gemma3_text"}:
        fields["attention_bias"] = draw.random() < 0.5
    if family in {"mistral", "mistral3", "phi3"}:
        fields["sliding_window"] = draw.choice([None, 2, 40])
    if family in {"glm", "glm4"}:
        fields["head_dim"] = 4 * draw.randint(1, 6)
    if family == "phi3":
        del fields["head_dim"], fields["rope_parameters"]
        pairs = fields["hidden_size"] // heads // 2
        fields |= draw.choice([{}, long(pairs, 512, factor=4.0)])
    if family == "granite":
        for name in ("embedding", "residual", "attention"):
            fields[f"{name}_multiplier"] = draw.choice([0.22, 0.3, 0.7])
        fields["logits_scaling"] = draw.choice([3.0, 5.0, 16.0])
    if family in {"gemma3_text", "gemma3"}:
        rules = {"full_attention": fields["rope_parameters"] or LINEAR}
        rules["sliding_attention"] = {"rope_type": "default", "rope_theta": 300.0}
        kinds = [draw.choice(list(rules)) for _ in range(fields["num_hidden_layers"])]
        fields |= {"rope_parameters": rules, "layer_types": kinds}
        fields |= {"sliding_window": draw.choice([2, 40]), "query_pre_attn_scalar": 11}
    return Case(f"random-{seed}", family, fields, draw.random() < 0.5, draw.random() < 0.5)


Loaded = tuple[Reference, Tensor, Tensor, Tensor]


@pytest.fixture(
    scope="module", params=CASES + [random_case(i) for i in range(20)], ids=lambda c: c.id
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    """Soloist's model, 300 tokens, the oracle's logits of them and of the first token alone."""
    case: Case = request.param
    oracle = build(case)
    model = load(save(oracle, case, tmp_path_factory.mktemp("model")))
    ids = prompt(300, oracle.config.get_text_config().vocab_size)
    return model, ids, oracle_logits(oracle, ids), oracle_logits(oracle, ids[:1])


def test_one_prefill_gives_all_rows(loaded: Loaded) -> None:
    model, ids, wanted, _ = loaded
    assert_close(run(model, ids, [300]), wanted, "transformers", "one prefill")


def test_uneven_chunks_give_the_same_rows(loaded: Loaded) -> None:
    model, ids, wanted, _ = loaded
    chunks = [1, 7, 8, 9, 64, 2, 100, 109]
    assert_close(run(model, ids, chunks, capacity=511), wanted, "transformers", f"chunks {chunks}")


def test_single_steps_give_the_same_rows(loaded: Loaded) -> None:
    model, ids, wanted, _ = loaded
    seen = run(model, ids[:150], [1] * 150)
    assert_close(seen, wanted[:150], "transformers", "token by token")


def test_a_prompt_of_one_token(loaded: Loaded) -> None:
    model, ids, _, wanted = loaded
    assert_close(run(model, ids[:1], [1]), wanted, "transformers", "one token")


def test_rows_choose_which_logits_come_back(loaded: Loaded) -> None:
    model, ids, wanted, _ = loaded
    cache = model.new_cache(300)
    assert model.forward(ids[:100], 0, cache, "none") is None
    last = model.forward(ids[100:], 100, cache)
    assert last is not None
    assert last.dtype is torch.float32
    assert_close(last, wanted[-1:], "transformers", "the last row after a silent chunk")
