"""Where a SentencePiece-style tokenizer puts the space before a word.

The tokenizer.json of many Llama-2-like checkpoints was written by a converter that puts a space
before every piece of text between special tokens. Where tokenizer_config.json names the class
LlamaTokenizer, transformers >= 5 puts one at the start of the whole text only, unless the file says
`legacy`. The two give different ids in every chat prompt, so this file follows transformers.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from soloist.text.decoder import steps_of
from soloist.text.files import read_json

SPACE_MARK = "▁"
# For these model types transformers takes tokenizer.json as it stands, whatever class is named.
_TAKEN_AS_WRITTEN = {"mistral", "mixtral", "ministral", "mistral3", "ministral3"}


def follow_llama_class(backend: Tokenizer, folder: Path) -> None:
    """Change `backend` in place to what transformers' LlamaTokenizer makes of the folder."""
    config = read_json(folder / "tokenizer_config.json")
    named_class = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    model_type = read_json(folder / "config.json").get("model_type")
    if (
        named_class != "LlamaTokenizer"
        or model_type in _TAKEN_AS_WRITTEN
        or not isinstance(backend.model, models.BPE)
        or _is_byte_level(backend)
    ):
        return
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy", False) else "first") if prefix else "never"
    backend.model.byte_fallback = True
    backend.model.fuse_unk = True
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    parts = (backend.pre_tokenizer, backend.decoder)
    steps = [step for part in parts if part for step in steps_of(json.loads(part.__getstate__()))]
    return any(step["type"] == "ByteLevel" for step in steps)
