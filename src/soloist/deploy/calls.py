"""What the ingress and a replica say to each other; it crosses machines."""

from dataclasses import dataclass, field

from soloist.deploy.prefix import Wish

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """An HTTP request on its way to a replica.

    Attributes:
        method: of HTTP.
        path: decoded.
        query: as it came.
        headers: names in lower case, without those that concern the connection or hold a key.
        body: all of it.
        wish: for the choice of its replica.
    """

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""
    wish: Wish = field(default_factory=Wish)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a reply; more of its body follows in pieces of bytes.

    Attributes:
        status: of HTTP.
        headers: names in lower case.
        body: its first piece, with which it travels: a piece alone would be a message more to wait
            for.
    """

    status: int
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Told:
    """A whole reply of one replica.

    Attributes:
        replica: which one.
        node: the node it is on, as Ray names it.
        status: of HTTP.
        body: all of it.
    """

    replica: str
    node: str
    status: int
    body: bytes
