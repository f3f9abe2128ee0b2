"""What the first bytes of a GGUF file promise, before the rest is fetched."""

import tempfile
from pathlib import Path

from soloist.errors import BadGguf, CheckpointError, TruncatedFile, UnsupportedGguf
from soloist.gguf.header import read_header
from soloist.gguf.splits import Gguf
from soloist.model.gguf.configuration import architecture_of

# Headers have some ten megabytes, nearly all of it the vocabulary.
HEAD_BYTES = 32 << 20


def require_promising(shown: str, head: bytes, num_bytes: int) -> None:
    """Refuse a file whose header asks for what is not read.

    Args:
        shown: what people call the file.
        head: its first `HEAD_BYTES`, or all of it.
        num_bytes: of the whole file.

    Raises:
        CheckpointError: an architecture or a type of tensors that is not read.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "head.gguf"
        file.write_bytes(head)
        with file.open("r+b") as opened:  # the rest takes no room
            opened.truncate(num_bytes)
        try:
            header = read_header(file)
            architecture_of(Gguf(file, header.metadata, header.tensors, {}))
        except UnsupportedGguf as error:
            message = error.message.replace(str(file), shown)
            raise CheckpointError(message, error.hint) from None
        except (BadGguf, TruncatedFile):
            return  # the header may be longer: the whole file will tell
