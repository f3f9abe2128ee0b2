"""Where a request comes from, as its headers say: the name it was sent to, the page that sent it.

Browsers write these headers and pages cannot change them. So they tell a person's own programs from
web pages that want to use a server which only this person should reach (DNS rebinding, cross-site
requests). Other programs can write what they like; keys are for those.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from soloist.server.problems import Problem

# What a link on any web page may open. Neither page does anything before a person does
# (`playground.page` sees to it).
PAGES = frozenset({"/", "/docs"})

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?)(?::([0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MOST_SHOWN = 80
_MOST_LENGTH = 300  # DNS has names of up to 253 (RFC 1035)


@dataclass(frozen=True, slots=True)
class Authority:
    """A name or an IP address, and a port where one is written.

    Attributes:
        name: lower case, without brackets and without a dot at the end.
        port: None where none is written.
    """

    name: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "Authority | None":
        """`NAME`, `NAME:PORT`, `[IPV6]` or `[IPV6]:PORT`; None for anything else."""
        if len(text) > _MOST_LENGTH or (found := _AUTHORITY.fullmatch(text.lower())) is None:
            return None
        name, port = found[1].removesuffix("."), int(found[2]) if found[2] else None
        if name.startswith("["):
            try:
                name = str(IPv6Address(name[1:-1]))
            except ValueError:
                return None
        return None if port is not None and port > 65_535 else cls(name, port)


@lru_cache(maxsize=256)
def is_local(name: str) -> bool:
    """Whether a name or an address without port can only mean the machine it is used on.

    `localhost` and what ends in `.localhost` never come from DNS (RFC 6761, section 6.3).
    """
    name = name.lower().removesuffix(".")
    try:
        address: IPv4Address | IPv6Address = ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def takes_any_name(bound_to: str, allowed_hosts: Collection[str]) -> bool:
    """Whether a server may be called by names that nobody told it.

    Args:
        bound_to: the address it listens on.
        allowed_hosts: names told; '*' allows any. None allows any as well where the server listens
            for other machines, since it cannot know what they call it.
    """
    return "*" in allowed_hosts or (not allowed_hosts and not is_local(bound_to))


class Sender:
    """The headers of one request that say where it comes from; each may come several times.

    Args:
        headers: all of them; names are lower case.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        found: dict[bytes, list[str]] = {}
        for name, value in headers:
            if name in _KEPT:
                found.setdefault(name, []).append(value.decode("latin-1"))
        self._found = found

    def values(self, name: bytes) -> list[str]:
        """Of one of these headers, in their order."""
        return self._found.get(name, [])

    @property
    def is_page(self) -> bool:
        """Whether a browser says that a page sent it; not every program that says so is one."""
        return b"origin" in self._found or b"sec-fetch-site" in self._found

    @property
    def has_body(self) -> bool:
        """Whether more than the headers comes."""
        lengths = self.values(b"content-length")
        return b"transfer-encoding" in self._found or any(length != "0" for length in lengths)


_KEPT = frozenset(
    {
        b"host", b"origin", b"content-type", b"content-length", b"transfer-encoding",
        b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest",
    }
)  # fmt: skip


class Senders:
    """Whose requests a server takes.

    Args:
        bound_to: the address it listens on.
        allowed_hosts: names it may be called by beside local ones; see `takes_any_name`.
        allowed_origins: of web pages that may use it; '*' allows all.
    """

    def __init__(
        self, bound_to: str, allowed_hosts: Collection[str], allowed_origins: Collection[str]
    ) -> None:
        self._takes_any_name = takes_any_name(bound_to, allowed_hosts)
        self._names = frozenset(
            found.name for name in allowed_hosts if (found := host_name(name)) is not None
        )
        self._origins = frozenset(origin.lower() for origin in allowed_origins)
        self._shown_names = ", ".join(("localhost", "127.0.0.1", "[::1]", *allowed_hosts))

    def check(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a request that a web page from elsewhere may have made.

        Args:
            method: of the request.
            path: of the request.
            headers: their names in lower case.

        Raises:
            Problem: 400, 403 or 415.
        """
        sender = Sender(headers)
        host = self._host(sender.values(b"host"))
        if sender.is_page:
            self._check_page(sender, host, may_be_linked=method == "GET" and path in PAGES)
            _check_type(sender)

    def _host(self, given: list[str]) -> Authority | None:
        if len(given) != 1:
            raise Problem(
                400, f"the request has {len(given) or 'no'} Host headers (allowed: exactly one)"
            )
        host = Authority.parse(given[0])
        if not self._takes_any_name and not self._knows(host):
            raise Problem(
                403,
                f"Host is '{_shown(given[0])}' (allowed: {self._shown_names}); to allow another "
                "name, start the server with --allowed-host NAME",
                code="host_not_allowed",
            )
        return host

    def _knows(self, host: Authority | None) -> bool:
        return host is not None and (host.name in self._names or is_local(host.name))

    def _check_page(self, sender: Sender, host: Authority | None, *, may_be_linked: bool) -> None:
        origins = sender.values(b"origin")
        if "*" in self._origins or self._names_all(origins):
            return
        if not all(_is_same(origin, host) for origin in origins):
            raise self._foreign(f"a page of '{_shown(', '.join(origins))}'")
        is_link = sender.values(b"sec-fetch-mode") == ["navigate"] and sender.values(
            b"sec-fetch-dest"
        ) == ["document"]
        if "cross-site" in sender.values(b"sec-fetch-site") and not (may_be_linked and is_link):
            raise self._foreign("a page of another site")

    def _names_all(self, origins: list[str]) -> bool:
        return bool(origins) and all(origin.lower() in self._origins for origin in origins)

    def _foreign(self, sent_by: str) -> Problem:
        allowed = ", ".join(("pages of this server", *sorted(self._origins)))
        return Problem(
            403,
            f"the request was sent by {sent_by} (allowed: {allowed}); to allow another origin, "
            "start the server with --cors-origin ORIGIN",
            code="origin_not_allowed",
        )


def host_name(name: str) -> Authority | None:
    """A name or an IP address without port, brackets around IPv6 or not; None for anything else."""
    try:
        return Authority(str(ip_address(name)), None)
    except ValueError:
        found = Authority.parse(name)
    return found if found is not None and found.port is None and name[-1:] != ":" else None


def _is_same(origin: str, host: Authority | None) -> bool:
    """Whether a page of this origin came from the server that is called so.

    Only the authority is compared: what ends TLS before the server changes the scheme.
    """
    scheme, found, rest = origin.partition("://")
    page = Authority.parse(rest) if found else None
    if host is None or page is None:
        return False
    default = _DEFAULT_PORTS.get(scheme.lower())
    return (page.name, page.port or default) == (host.name, host.port or default)


def _check_type(sender: Sender) -> None:
    """Pages send other types without asking first, so JSON has to say that it is JSON."""
    given = sender.values(b"content-type")
    kinds = [kind.partition(";")[0].strip().lower() for kind in given]
    if sender.has_body and kinds != ["application/json"]:
        told = f"'{_shown(', '.join(given))}'" if given else "missing"
        raise Problem(415, f"Content-Type is {told} (allowed from a browser: application/json)")


def _shown(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
