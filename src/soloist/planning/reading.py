"""A config.json as a model to plan for: any that is served, and mixtures of experts. Pure."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from soloist.errors import (
    ConfigError,
    MissingField,
    UnknownFamily,
    UnknownField,
    WrongType,
    quoted,
)
from soloist.gguf.names import is_gguf
from soloist.model.families import FAMILIES, read_config
from soloist.model.quantization import FIELDS as QUANTIZATION_FIELDS
from soloist.model.reading import HARMLESS, Fields, read_json
from soloist.planning.mixture import READERS
from soloist.planning.model import Model, served

_TEXT = "text_config"

# Fields that change what a model computes, but neither how many numbers it has nor how many a token
# needs, or by too little to matter (biases, norms of heads). Beside `HARMLESS`.
_SIZELESS = frozenset(
    """
    attention_bias attn_scale attn_temperature_tuning aux_loss_alpha clip_qkv ep_size floor_scale
    for_llm_compressor hidden_act indexer_rope_interleave initial_context_length
    input_jitter_noise lm_head_bias mamba_ssm_dtype mlp_bias mtp_num_hidden_layers
    mtp_transformer_layers mtp_use_dedicated_embeddings n_group norm_topk_prob num_mtp_modules
    num_nextn_predict_layers output_router_logits partial_rotary_factor qk_norm_type qkv_bias
    quantization_config rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta
    rotary_dim routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func seq_aux
    swiglu_alpha swiglu_limit topk_group topk_method use_mtp use_qk_norm use_routing_bias
    """.split()  # noqa: SIM905 - one name a line would be four times as long
)


def read_model(file: Path, accepted: Collection[str] = ()) -> Model:
    """A configuration of any family that is served, or of a mixture in `READERS`.

    `accepted` names fields that may be there although nobody knows them.
    Of a model that also sees or hears (`text_config`) the part that makes text is read.

    Raises:
        ConfigError: a field is missing, has a value that is not understood, or may change sizes in
            a way that is not known.
        UnknownFamily: it is of no known family.
    """
    if is_gguf(file):
        return served(read_config(file, accepted))
    values = read_json(file)
    if _TEXT in values and values.get("model_type") not in FAMILIES:
        return _read_text_part(file, values[_TEXT], accepted)
    family = values.get("model_type")
    if isinstance(family, str) and family in READERS:
        return _read_mixture(Fields(values, str(file), family, accepted=accepted))
    if isinstance(family, str) and family not in FAMILIES:
        raise UnknownFamily(str(file), family, _families())
    return served(read_config(file, accepted))


def _read_text_part(file: Path, values: Any, accepted: Collection[str]) -> Model:  # noqa: ANN401
    if not isinstance(values, dict):
        raise WrongType(str(file), _TEXT, values, "an object")
    family = values.get("model_type")
    if not isinstance(family, str):
        raise MissingField(str(file), f"{_TEXT}.model_type", f"one of {', '.join(_families())}")
    fields = Fields(values, str(file), family, f"{_TEXT}.", accepted)
    if family in READERS:
        return replace(_read_mixture(fields), is_part=True)
    if family not in FAMILIES:
        raise UnknownFamily(str(file), family, _families())
    config = FAMILIES[family].read(fields)
    fields.ignore(*QUANTIZATION_FIELDS)  # sizes are planned for every precision
    fields.refuse_rest()
    fields.require_passed()
    return replace(served(config), is_part=True, config=None)


def _read_mixture(fields: Fields) -> Model:
    model = READERS[fields.family](fields)
    try:
        fields.refuse_rest(HARMLESS | _SIZELESS)
        fields.require_passed()
    except UnknownField as error:
        raise ConfigError(
            f"{fields.file}: Soloist does not know whether field {quoted(error.field)} changes the "
            f"size of a '{fields.family}'",
            f"if you know that it does not, add --accept-field {error.field}",
        ) from error
    return model


def _families() -> list[str]:
    return sorted({*FAMILIES, *READERS})
