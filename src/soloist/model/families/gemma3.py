"""`gemma3`: Gemma 3 from 4B on: the text of a `gemma3_text` with a vision tower beside it."""

from soloist.model.config import ModelConfig
from soloist.model.families import gemma3_text
from soloist.model.families.dense import decoder_tensors
from soloist.model.families.nested import IGNORED, nested, read_text_config
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

__all__ = ["IGNORED", "read", "tensors"]


def read(fields: Fields) -> ModelConfig:
    """`text_config` is that of a `gemma3_text`."""
    return read_text_config(fields, "gemma3_text", gemma3_text.read)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, nested(gemma3_text.NAMES))
