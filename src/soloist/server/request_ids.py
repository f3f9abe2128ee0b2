"""The id by which a client and an operator name one request, in a header of every reply."""

import re
import uuid
from collections.abc import Iterable

HEADER = b"x-request-id"
_SHORT = re.compile(rb"[!-~]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The one that the client gave, if it is short and printable; else a new one."""
    for name, value in headers:
        if name == HEADER and _SHORT.fullmatch(value):
            return value
    return b"req_" + uuid.uuid4().hex.encode()
