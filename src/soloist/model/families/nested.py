"""Families of text and images: the language model lies in `text_config`, all else is left out.

Only text is read. What describes images changes nothing for it: the vision tower's configuration,
the projector, and the tokens that stand for images.
"""

from collections.abc import Callable
from dataclasses import replace

from soloist.errors import MissingField
from soloist.model.config import ModelConfig
from soloist.model.families.dense import Names
from soloist.model.reading import Fields

# Tensors of the vision tower, and of what connects it with the language model.
IGNORED = (r"vision_tower\..*", r"multi_modal_projector\..*")

_OF_IMAGES = (
    *("vision_config", "vision_feature_layer", "spatial_merge_size", "mm_tokens_per_image"),
    *("projector_hidden_act", "multimodal_projector_bias"),
    *("image_token_index", "image_token_id", "boi_token_index", "boi_token_id"),
    *("eoi_token_index", "eoi_token_id"),
)


def read_text_config(
    fields: Fields, model_type: str, read: Callable[[Fields], ModelConfig]
) -> ModelConfig:
    """The language model, as its own family reads it.

    Args:
        fields: of the whole.
        model_type: that `text_config` has to have.
        read: reads it.
    """
    text = fields.group("text_config")
    if text is None:
        raise MissingField(fields.file, fields.path("text_config"), "an object")
    text.choice("model_type", (model_type,), None)
    fields.ignore(*_OF_IMAGES)
    config = read(text)
    text.refuse_rest()
    # Where both objects say whether the head is tied, transformers looks at the outer one.
    return replace(config, tied_head=fields.flag("tie_word_embeddings", config.tied_head))


def nested(names: Names) -> Names:
    """Names of tensors in the checkpoint of the whole."""
    return replace(names, root="language_model.model.", head="language_model.lm_head.weight")
