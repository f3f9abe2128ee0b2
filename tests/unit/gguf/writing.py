"""GGUF files as llama.cpp's converter writes them, made with gguf-py from folders and tensors.

gguf-py has no K-quants to write, so `encoded` has simple ones: their codes need not be the best.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, quants
from safetensors import safe_open
from torch import Tensor

from soloist.model.folder import shipped_folder
from soloist.model.gguf.naming import to_gguf

# Keys by fields of config.json, under the architecture's prefix.
KEYS = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count", "head_dim": "attention.key_length",
    "num_key_value_heads": "attention.head_count_kv", "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "vocab_size": "vocab_size",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count", "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count", "rotary_dim": "rope.dimension_count",
}  # fmt: skip
# What llama.cpp calls families.
NAMES = {
    "qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "glm4_moe": "glm4moe", "mixtral": "llama",
}  # fmt: skip
PERMUTED = ("llama", "smollm3")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

# Numbers that a thread turns into blocks together.
_AT_ONCE = 1 << 22

TypeOf = Callable[[str], str]


def write(
    file: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    type_of: str | TypeOf = "F32",
    metadata: Mapping[str, Any] | None = None,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
    **options: Any,
) -> Path:
    """One file, or parts with gguf-py's `split_max_tensors`.

    Args:
        file: to write.
        config: fields of config.json.
        tensors: by the names of families.
        type_of: of the matrices; vectors are in F32, as everywhere.
        metadata: further keys, or other values; None leaves a key out.
        more: further tensors by the file's names, in F32.
        options: of `GGUFWriter`.
    """
    family = config["model_type"]
    architecture = NAMES.get(family, family)
    writer = gguf.GGUFWriter(file, architecture, **options)
    values = {f"{architecture}.{key}": config[name] for name, key in KEYS.items() if name in config}
    values |= {"general.name": "test", "general.file_type": 0}
    if not any(key.startswith("tokenizer") for key in metadata or {}):
        values |= numbered_tokens(config["vocab_size"])
    for key, value in (values | dict(metadata or {})).items():
        if value is not None:
            add(writer, key, value)
    for name, values in tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        count = heads.get(name.split(".")[-2], 0) if architecture in PERMUTED else 0
        rows = permuted(values.float(), count) if count else values.float()
        is_exact = rows.dim() == 1 or name.endswith((".gate.weight", "_gate.weight"))
        wanted = "F32" if is_exact else type_of if isinstance(type_of, str) else type_of(name)
        kind = GGMLQuantizationType[wanted]
        flat = rows.flatten(0, -2) if rows.dim() > 1 else rows
        array = encoded(flat.numpy(), kind)
        array = array.reshape(*rows.shape[:-1], -1) if rows.dim() > 2 else array.squeeze()
        writer.add_tensor(to_gguf(name, family), array, raw_dtype=kind)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key with the type that the converter gives to such a value."""
    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING, list: GGUFValueType.ARRAY,
    }  # fmt: skip
    writer.add_key_value(key, value, kinds[type(value)])


def permuted(rows: Tensor, heads: int) -> Tensor:
    """As the converter deals out the halves of each head's rows."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def numbered_tokens(count: int) -> dict[str, Any]:
    """A vocabulary for models whose text does not matter."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(count)],
        "tokenizer.ggml.eos_token_id": 2,
    }


def tokenizer_of(folder: Path, pre: str) -> dict[str, Any]:
    """The keys that the converter makes of a byte-level tokenizer.json."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokens = {index: token for token, index in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, 1)
    for added in data["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = 3 if added["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    count = max(tokens) + 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": [kinds.get(i, 5) for i in range(count)],
        "tokenizer.ggml.merges": merges,
    }


def write_etude(
    file: Path, type_of: str | TypeOf = "Q8_0", name: str = "etude", **given: Any
) -> Path:
    """A shipped model as one file, with its tokenizer and template."""
    folder = shipped_folder(name)
    metadata = {
        **tokenizer_of(folder, "llama-bpe"),
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text("utf-8"),
        **given.pop("metadata", {}),
    }
    with safe_open(folder / "model.safetensors", "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return write(file, config, tensors, type_of, metadata, **given)


def encoded(values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Numbers [N, K] as blocks, uint8 [N, bytes]; plain ones as they are."""
    parts = np.array_split(values, max(1, values.size // _AT_ONCE))  # of rows
    with ThreadPoolExecutor() as pool:
        return np.concatenate(list(pool.map(partial(_encoded, kind=kind), parts)))


def _encoded(values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    own = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.get(kind.name)
    if own is None:
        return quants.quantize(values, kind)
    return own(values.reshape(len(values), -1, 256)).reshape(len(values), -1)


def _half(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values.astype(np.float16)[..., None]).view(np.uint8)


def _safe(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(values == 0, 1, values)


def _minimal(x: np.ndarray[Any, Any], most: int) -> tuple[Iterable[Any], np.ndarray[Any, Any]]:
    """Fields d, dmin and s of K-quants with minima, and codes [N, B, 8, 32] up to `most`."""
    x = x.reshape(*x.shape[:2], 8, 32)
    low = np.maximum(-x.min(-1), 0)
    width = np.maximum((x.max(-1) + low) / most, 1e-8)
    d, dmin = width.max(-1) / 63, low.max(-1) / 63
    d16, dmin16 = (v.astype(np.float16).astype(np.float32) for v in (d, dmin))
    sc = np.clip(np.rint(width / _safe(d16)[..., None]), 1, 63).astype(np.uint8)
    m = np.clip(np.rint(low / _safe(dmin16)[..., None]), 0, 63).astype(np.uint8)
    step, offset = _safe(d16[..., None] * sc)[..., None], (dmin16[..., None] * m)[..., None]
    codes = np.clip(np.rint((x + offset) / step), 0, most).astype(np.uint8)
    s = np.concatenate(
        (
            sc[..., :4] | sc[..., 4:] >> 4 << 6,
            m[..., :4] | m[..., 4:] >> 4 << 6,
            sc[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
        ),
        axis=-1,
    )
    return (_half(d), _half(dmin), s), codes


def _pairs(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sub-blocks 2 i and 2 i + 1 of four bits each, in one byte of both."""
    low, high = codes[:, :, ::2] & 15, codes[:, :, 1::2] & 15
    return (low | high << 4).reshape(*codes.shape[:2], 128)


def _q4_k(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fields, codes = _minimal(x, 15)
    return np.concatenate((*fields, _pairs(codes)), axis=-1)


def _q5_k(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fields, codes = _minimal(x, 31)
    bits = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(bits, axis=2)
    return np.concatenate((*fields, high, _pairs(codes)), axis=-1)


def _q6_k(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = x.reshape(*x.shape[:2], 16, 16)
    width = np.abs(x).max(-1) / 31
    d = width.max(-1) / 127
    d16 = _safe(d.astype(np.float16).astype(np.float32))
    sc = np.clip(np.rint(width / d16[..., None]), 1, 127).astype(np.int8)
    codes = np.clip(np.rint(x / (d16[..., None] * sc)[..., None]), -32, 31) + 32
    codes = codes.astype(np.uint8).reshape(*x.shape[:2], 2, 4, 32)
    low = codes[:, :, :, :2] & 15 | (codes[:, :, :, 2:] & 15) << 4
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce((codes >> 4) << shifts, axis=3)
    shape = x.shape[:2]
    return np.concatenate(
        (low.reshape(*shape, 128), high.reshape(*shape, 64), sc.view(np.uint8), _half(d)), axis=-1
    )


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A transformers model's parameters by the names of families; experts of a layer together.

    The number of an expert is then 0.
    """
    found = {}
    corrections = [(k, v) for k, v in model.named_buffers() if k.endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *corrections]:
        values = parameter.detach().clone()
        layer, _, matrix = name.partition(".mlp.experts.")
        if matrix == "gate_up_proj":
            for part, half in zip(("gate_proj", "up_proj"), values.chunk(2, 1), strict=True):
                found[f"{layer}.mlp.experts.0.{part}.weight"] = half
        elif matrix:
            found[f"{layer}.mlp.experts.0.down_proj.weight"] = values
        else:
            found[name] = values
    return found
