"""Names of tensors: GGUF's and those that families know from the Hugging Face decoders. Pure."""

import re
from collections.abc import Mapping
from typing import Final

ROPE_FREQS: Final = "rope_freqs.weight"

_OUTSIDE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INSIDE: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE_BACK = {known: own for own, known in _OUTSIDE.items()}
_INSIDE_BACK = {known: own for own, known in _INSIDE.items()}
# A layer's number as both write it, so that no two names mean the same.
_NUMBER = "0|[1-9][0-9]*"
_IN_GGUF = re.compile(rf"(?:blk\.(?P<layer>{_NUMBER})\.)?(?P<stem>\w+)\.(?P<end>weight|bias)")
_IN_FAMILIES = re.compile(
    rf"(?:model\.layers\.(?P<layer>{_NUMBER})\.)?(?P<stem>\w+(?:\.\w+)?)\.(?P<end>weight|bias)"
)


def to_families(name: str) -> str | None:
    """What families call a tensor of a file; None for one that they do not know."""
    found = _IN_GGUF.fullmatch(name)
    if found is None:
        return None
    stem = (_OUTSIDE if found["layer"] is None else _INSIDE).get(found["stem"])
    if stem is None:
        return None
    layer = "" if found["layer"] is None else f"model.layers.{found['layer']}."
    return f"{layer}{stem}.{found['end']}"


def to_gguf(name: str) -> str:
    """What a file calls a tensor of a family; a name that is none stays as it is."""
    found = _IN_FAMILIES.fullmatch(name)
    if found is None:
        return name
    stem = (_OUTSIDE_BACK if found["layer"] is None else _INSIDE_BACK).get(found["stem"])
    if stem is None:
        return name
    layer = "" if found["layer"] is None else f"blk.{found['layer']}."
    return f"{layer}{stem}.{found['end']}"
