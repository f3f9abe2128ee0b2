"""Names of tensors: GGUF's and those that families know from the Hugging Face decoders. Pure."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Final

from soloist.model.expert_files import names_of

ROPE_FREQS: Final = "rope_freqs.weight"

# A tensor with the matrices of all experts of a layer has this end, and families' names a star.
STACKED: Final = "_exps.weight"

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
# A layer's number as both write it, so that no two names mean the same.
_NUMBER = "0|[1-9][0-9]*"
_IN_GGUF = re.compile(rf"(?:blk\.(?P<layer>{_NUMBER})\.)?(?P<rest>\w+\.(?:weight|bias))")
_IN_FAMILIES = re.compile(rf"(?:model\.layers\.(?P<layer>{_NUMBER})\.)?(?P<rest>\w+(?:\.\w+)*)")
_EXPERT = re.compile(rf"\.experts\.(?:{_NUMBER})\.")


@cache
def _tables(family: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Names outside and inside of layers, each with its end, as a file of this family has them."""
    inside = dict(_INSIDE)
    if family == "glm4_moe":
        del inside["ffn_norm"]
        inside["post_attention_norm"] = "post_attention_layernorm"
    names = names_of(family)
    block, shared = names.block, f"{names.block}.{names.shared}"
    inside |= {
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.experts.*.{names.gate}",
        "ffn_up_exps": f"{block}.experts.*.{names.up}",
        "ffn_down_exps": f"{block}.experts.*.{names.down}",
        "ffn_gate_inp_shexp": f"{shared}_gate",
        "ffn_gate_shexp": f"{shared}.gate_proj",
        "ffn_up_shexp": f"{shared}.up_proj",
        "ffn_down_shexp": f"{shared}.down_proj",
    }
    ends = ("weight", "bias")
    outside, within = (
        {f"{own}.{end}": f"{known}.{end}" for own, known in table.items() for end in ends}
        for table in (_OUTSIDE, inside)
    )
    within["exp_probs_b.bias"] = f"{block}.gate.e_score_correction_bias"
    return outside, within


@cache
def _tables_back(family: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    outside, inside = ({known: own for own, known in t.items()} for t in _tables(family))
    return outside, inside


def to_families(name: str, family: str = "") -> str | None:
    """What a family calls a tensor of a file; None for one that it does not know.

    Of a tensor with all experts of a layer, with a star for their number.
    """
    found = _IN_GGUF.fullmatch(name)
    if found is None:
        return None
    outside, inside = _tables(family)
    if found["layer"] is None:
        return outside.get(found["rest"])
    known = inside.get(found["rest"])
    return None if known is None else f"model.layers.{found['layer']}.{known}"


def to_gguf(name: str, family: str = "") -> str:
    """What a file calls a tensor of a family; a name that is none stays as it is."""
    found = _IN_FAMILIES.fullmatch(_EXPERT.sub(".experts.X.", name))
    if found is None:
        return name
    outside, inside = _tables_back(family)
    rest = found["rest"].replace(".experts.X.", ".experts.*.")
    own = (outside if found["layer"] is None else inside).get(rest)
    if own is None:
        return name
    return own if found["layer"] is None else f"blk.{found['layer']}.{own}"
