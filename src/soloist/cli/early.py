"""What goes on while Python imports torch: making the GPU's context, moving files to its memory."""

from typing import TYPE_CHECKING

from soloist.jit.wake import driver, wake, wanted_gpu

if TYPE_CHECKING:
    from soloist.weights.upload import Upload


def begin(model: str, device: str, gpus: str, revision: str | None) -> "Upload | None":
    """Start both for a command's options; errors are left to the code that needs the model.

    Returns:
        The model's files on their way; None where no GPU is asked for, or several, which read their
        shares, or nothing to read is here, or it is a GGUF file.
    """
    ordinal = wanted_gpu(device)
    if ordinal is None or driver() is None:
        return None
    wake(device)
    if gpus != "1":
        for other in range(1, int(gpus) if gpus.isdecimal() else 1):
            wake(f"cuda:{other}")
        return None
    return _upload(model, ordinal, revision)


def _upload(model: str, ordinal: int, revision: str | None) -> "Upload | None":
    # Imported while another thread makes the context.
    from soloist.errors import SoloistError
    from soloist.gguf.names import is_gguf
    from soloist.model.checkpoint import open_checkpoint
    from soloist.model.folder import find_model
    from soloist.weights.upload import GpuMemory, Upload

    try:
        # What is not here yet is fetched later, before the user's eyes.
        found = find_model(model, revision=revision, offline=True)
        if is_gguf(found):  # its bytes are decoded on the way
            return None
        checkpoint = open_checkpoint(found)
        memory = GpuMemory(ordinal)
        return Upload(checkpoint.files, memory, f"cuda:{ordinal}", growth=checkpoint.growth)
    except (SoloistError, OSError):
        return None
