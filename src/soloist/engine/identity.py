"""What the bits of a prompt's keys and values depend on, as a hash: whose saved chunks may be used.

Too much rather than too little: where anything here differs, prompts are read again.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from pathlib import Path

import torch

import soloist
from soloist.device import cpu_name
from soloist.engine.config import Resolved
from soloist.errors import SettingError
from soloist.model.config import ModelConfig

# Parts of the package that compute nothing of a prompt.
_APART = {"cli", "server", "bench", "deploy", "planning"}
_SOURCES = {".py", ".cu", ".cuh"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_HASHES = "hashes"


def open_cache_dir(root: Path) -> Path:
    """The folder of saved prompts, made if it is not there, and tried.

    Raises:
        SettingError: nothing can be written there.
    """
    trial = root / f".trial-{os.getpid()}"
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise SettingError(
            "cache dir", str(root), f"a folder that can be written ({error.strerror or error})",
            "name another folder, or let this user write there",
        ) from error  # fmt: skip
    return root.resolve()


def identity_of(facts: Iterable[object]) -> bytes:
    """16 bytes that stand for all of them."""
    return blake2b("\n".join(map(repr, facts)).encode(), digest_size=16).digest()


def facts_of(
    root: Path,
    folder: Path,
    files: Sequence[Path],
    config: ModelConfig,
    resolved: Resolved,
    *more: object,
) -> tuple[object, ...]:
    """What bits depend on, but for what an executor adds.

    Args:
        root: the folder of saved prompts, which remembers hashes of files.
        folder: of the model, or its GGUF file.
        files: of weights, an adapter's included.
        config: what the model computes.
        resolved: device, precision, KV cache and ranks.
        more: how weights are rounded, and the like.
    """
    tokenizer = [f for name in _TOKENIZER_FILES if (f := folder / name).is_file()]
    with ThreadPoolExecutor(4, "soloist-hash") as pool:
        digests = tuple(pool.map(lambda file: _digest(root, file), [*files, *tokenizer]))
    on_gpu = resolved.device.startswith("cuda")
    names = resolved.rank_devices or (resolved.device,)
    # Libraries choose kernels by all of these.
    devices: object = (
        cpu_name(torch.get_num_threads()),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )
    if on_gpu:
        devices = [torch.cuda.get_device_name(name) for name in names]
    return (
        _source_digest(), torch.__version__, torch.version.cuda, devices, len(names),
        resolved.dtype.value, resolved.kv, config, digests, *more,
    )  # fmt: skip


def _digest(root: Path, file: Path) -> str:
    """SHA-256 of a file, remembered for as long as nobody touches it."""
    file = file.resolve()
    known = file.stat()
    facts = (str(file), known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino)
    memo = root / _HASHES / identity_of(facts).hex()
    try:
        if len(text := memo.read_text("ascii")) == 64:
            return text
    except (OSError, UnicodeDecodeError):
        pass  # it was not hashed before
    with file.open("rb") as opened:
        text = file_digest(opened, "sha256").hexdigest()
    part = memo.with_name(f"{memo.name}.{os.getpid()}")
    try:
        memo.parent.mkdir(0o700, exist_ok=True)
        part.write_text(text, "ascii")
        part.replace(memo)
    except OSError:
        part.unlink(missing_ok=True)  # the next start hashes again
    return text


def _source_digest() -> str:
    """Of the code that computes: another version may round otherwise."""
    package, digest = Path(soloist.__file__).parent, blake2b(digest_size=16)
    for file in sorted(package.rglob("*")):
        place = file.relative_to(package)
        if file.suffix in _SOURCES and place.parts[0] not in _APART:
            digest.update(str(place).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
