"""`mistral3`: Mistral Small 3.1 and 3.2: the text of a Mistral with a vision tower beside it."""

from soloist.model.config import ModelConfig
from soloist.model.families import mistral
from soloist.model.families.dense import LLAMA_NAMES, decoder_tensors
from soloist.model.families.nested import IGNORED, nested, read_text_config
from soloist.model.reading import Fields
from soloist.model.tensors import TensorSpec

__all__ = ["IGNORED", "read", "tensors"]


def read(fields: Fields) -> ModelConfig:
    """`text_config` is that of a `mistral`."""
    return read_text_config(fields, "mistral", mistral.read)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """As in the files."""
    return decoder_tensors(config, nested(LLAMA_NAMES))
