"""Between text and token ids: tokenizers, chat templates, and text that appears while it is made.

Knows nothing of models, devices or requests, and imports no torch.
"""

from soloist.text.messages import Message, Tool
from soloist.text.stream import TextStream
from soloist.text.tokenizer import Tokenizer

__all__ = ["Message", "TextStream", "Tokenizer", "Tool"]
