"""Files of the hub: which a repository has, and fetching some of them into the client's cache."""

from collections.abc import Sequence
from pathlib import Path

from soloist.errors import DownloadFailed

_TIMEOUT_S = 30.0


def download(hub_id: str, revision: str | None, wanted: Sequence[str], *, offline: bool) -> Path:
    """The folder of a repository in the cache, once the files that match `wanted` are there.

    Raises:
        DownloadFailed: they cannot be fetched.
    """
    # Slow to import, and most models are folders.
    import huggingface_hub
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(wanted),
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local cache" + ("" if offline else " and the hub is unreachable")
        raise DownloadFailed(hub_id, reason) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DownloadFailed(hub_id, _first_line(error)) from error


def names_in(hub_id: str, snapshot: Path, *, offline: bool) -> list[str]:
    """Names of a repository's files, with '/' between folders.

    Args:
        hub_id: 'owner/name'.
        snapshot: its folder in the cache, named after the commit.
        offline: only those that the cache holds; so, too, where the hub is out of reach.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if not offline:
        try:
            info = huggingface_hub.model_info(hub_id, revision=snapshot.name)
        except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError):
            pass
        else:
            return sorted(sibling.rfilename for sibling in info.siblings or ())
    return names_under(snapshot)


def fetch_head(hub_id: str, snapshot: Path, name: str, num_bytes: int) -> tuple[bytes, int]:
    """The first bytes of a file on the hub, and how many it has.

    Raises:
        DownloadFailed: they cannot be fetched.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported without __all__
        build_hf_headers,
        get_session,
    )

    url = huggingface_hub.hf_hub_url(hub_id, name, revision=snapshot.name)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes=0-{num_bytes}"}
    head = bytearray()
    try:
        asked = get_session().stream(
            "GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        )
        with asked as reply:
            reply.raise_for_status()
            whole = reply.headers.get("Content-Range", "").rpartition("/")[2]
            whole = whole or reply.headers.get("Content-Length", "")
            for chunk in reply.iter_raw():
                head += chunk
                if len(head) >= num_bytes:
                    break
    except (HfHubHTTPError, httpx2.HTTPError, OfflineModeIsEnabled, OSError) as error:
        raise DownloadFailed(hub_id, f"{name}: {_first_line(error)}") from error
    if not whole.isdecimal():
        raise DownloadFailed(hub_id, f"the hub gives no size of {name}")
    return bytes(head[:num_bytes]), int(whole)


def names_under(folder: Path) -> list[str]:
    """Names of the files in a folder and those below it."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
