"""Fetch weights from the hub into its cache, and go on where an interrupted download stopped.

The hub's own client begins an interrupted file anew. Here the bytes that arrived stay beside their
place, as `blobs/<etag>.incomplete`; the client then links the whole file as one of its own.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx2
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported without __all__
    WeakFileLock,
    build_hf_headers,
    get_session,
)

from soloist.errors import DiskFull, DownloadFailed

PART = ".incomplete"
_AT_ONCE = 4
_TIMEOUT_S = 30.0
_LOCK_S = 10.0
_ATTEMPTS = 5
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Missing:
    """A file of the hub that is not in the cache.

    Attributes:
        name: in its repository.
        url: where it is.
        blob: where it belongs, named after its etag.
        size_bytes: of all of it.
    """

    name: str
    url: str
    blob: Path
    size_bytes: int

    @property
    def part(self) -> Path:
        """What of it has arrived."""
        return self.blob.with_name(self.blob.name + PART)

    @property
    def arrived_bytes(self) -> int:
        """Of an earlier download."""
        return self.part.stat().st_size if self.part.exists() else 0


def find_missing(hub_id: str, snapshot: Path, names: Sequence[str]) -> list[Missing]:
    """Those of the named files that a snapshot of the cache lacks.

    Raises:
        DownloadFailed: the hub does not tell of one of them.
    """
    found = []
    for name in names:
        if (snapshot / name).exists():
            continue
        url = huggingface_hub.hf_hub_url(hub_id, name, revision=snapshot.name)
        try:
            facts = huggingface_hub.get_hf_file_metadata(url)
        except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError) as error:
            raise DownloadFailed(hub_id, f"{name}: {_first_line(error)}") from error
        if facts.etag is None or facts.etag != Path(facts.etag).name or facts.size is None:
            raise DownloadFailed(hub_id, f"the hub gives no size or no etag of {name}")
        found.append(Missing(name, url, snapshot.parents[1] / "blobs" / facts.etag, facts.size))
    return found


def fetch(
    hub_id: str, snapshot: Path, missing: Sequence[Missing], advance: Callable[[int], None]
) -> None:
    """Fetch files, several at once, and link each into the snapshot.

    Args:
        hub_id: whose files they are.
        snapshot: folder of the cache, named after its commit.
        missing: what to fetch.
        advance: is told the bytes that arrived; fewer than none where a file begins anew.

    Raises:
        DiskFull: they do not fit; nothing was fetched.
        DownloadFailed: the hub cannot be reached or a file is not what its etag says.
    """
    needed = sum(max(0, file.size_bytes - file.arrived_bytes) for file in missing)
    if needed > (free := shutil.disk_usage(snapshot).free):
        raise DiskFull(str(snapshot.parents[1]), needed, free)
    stopped = Event()

    def count(num_bytes: int) -> None:
        advance(num_bytes)
        if stopped.is_set():
            raise _Stopped

    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        for done in [pool.submit(_fetch, hub_id, snapshot, file, count) for file in missing]:
            done.result()
    finally:  # Ctrl-C included
        stopped.set()
        pool.shutdown(cancel_futures=True)


class _Stopped(Exception):
    """Another file failed, or the user wants no more; what arrived is kept."""


def _fetch(hub_id: str, snapshot: Path, file: Missing, advance: Callable[[int], None]) -> None:
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _lock(snapshot, file.blob.name):
            if not file.blob.exists():
                advance(file.arrived_bytes)
                _receive(file, advance)
                _check(hub_id, file)
                file.part.rename(file.blob)
        huggingface_hub.hf_hub_download(hub_id, file.name, revision=snapshot.name)
    except (HfHubHTTPError, httpx2.HTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DownloadFailed(hub_id, f"{file.name}: {_first_line(error)}") from error


def _lock(snapshot: Path, etag: str) -> AbstractContextManager[object]:
    """The one that the hub's client takes for this file."""
    repository = snapshot.parents[1]
    folder = repository.parent / ".locks" / repository.name
    folder.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(folder / f"{etag}.lock", timeout=_LOCK_S)


def _receive(file: Missing, advance: Callable[[int], None]) -> None:
    """Append what is missing to the part; a broken connection is tried again from there."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _append(file, advance)
        except httpx2.TransportError:
            if attempt == _ATTEMPTS:
                raise
        if file.arrived_bytes >= file.size_bytes:
            return


def _append(file: Missing, advance: Callable[[int], None]) -> None:
    start = file.arrived_bytes
    if start >= file.size_bytes > 0:
        return
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-"}
    asked = get_session().stream(
        "GET", file.url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
    )
    with asked as reply:
        reply.raise_for_status()
        is_rest = reply.status_code == httpx2.codes.PARTIAL_CONTENT
        if not is_rest:  # all of it comes
            advance(-start)
        with file.part.open("ab" if is_rest else "wb") as out:
            for chunk in reply.iter_raw():
                out.write(chunk)
                advance(len(chunk))


def _check(hub_id: str, file: Missing) -> None:
    """Length, and the hash where the etag is one, as it is of all large files."""
    wrong = ""
    if file.arrived_bytes != file.size_bytes:
        wrong = f"{file.arrived_bytes:,} of {file.size_bytes:,} bytes arrived"
        if file.arrived_bytes > file.size_bytes:  # nothing to go on with
            wrong += "; they were deleted"
            file.part.unlink()
    elif _SHA256.fullmatch(file.blob.name):
        with file.part.open("rb") as read:
            if hashlib.file_digest(read, "sha256").hexdigest() != file.blob.name:
                wrong = "its bytes are not those that its hash promises; they were deleted"
                file.part.unlink()
    if wrong:
        raise DownloadFailed(hub_id, f"{file.name}: {wrong}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
