"""Who may use the server: names it is called by, web pages, types of bodies; headers of replies."""

import socket
from dataclasses import replace

import httpx2
import pytest

from server.running import CONFIG, KEY, Scripted, running, scripted, wait_until_ready
from soloist.cli.serving import warnings_of
from soloist.errors import SettingError
from soloist.server.origin import Authority, Senders, is_local
from soloist.server.problems import Problem

ALL = "0.0.0.0"  # noqa: S104 - judged, not bound to
JSON = ("content-type", "application/json")
HOST = ("host", "localhost:8000")
LINK = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))
CROSS = ("sec-fetch-site", "cross-site")
LENGTH = ("content-length", "9")
BODY = {"prompt": "x", "max_tokens": 2}


def status(
    *headers: tuple[str, str],
    method: str = "POST",
    path: str = "/v1/completions",
    bound_to: str = "127.0.0.1",
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
) -> int:
    """What such a request is refused with; 200 if it is not."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    try:
        Senders(bound_to, hosts, origins).check(method, path, raw)
    except Problem as problem:
        return problem.status
    return 200


@pytest.fixture(scope="module")
def plain():
    """A server without key on loopback, and a client of it."""
    with running(lambda _: scripted(Scripted())) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            yield server, http


def raw_reply(server, *lines: str) -> bytes:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall("\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1"))
        found = b""
        while part := client.recv(65_536):
            found += part
    return found


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LocalHost:1", "localhost.", "localhost.:8000", "a.b.localhost:80",
        "127.0.0.1", "127.0.0.1:65535", "127.99.1.2:8000", "[::1]", "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000", "[::ffff:127.0.0.1]", "localhost:",
    ],
)  # fmt: skip
def test_local_names_are_let_in(host) -> None:
    assert status(("host", host)) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::1].evil",
        "evil@localhost", "localhost@evil", "localhost:80@evil", "localhost:8000:1", "[::1",
        "::1", "[::1%25lo]", "localhost/", "localhost evil", "localhost,evil", "localhost\t", "",
        "localhost:99999", "localhost:a", "localhost..", ".localhost", ALL, "[::]", "127.1",
        "0x7f.0.0.1", "2130706433", "0177.0.0.1", "127.0.0.1.", "192.168.0.7", "[2001:db8::1]",
        "xlocalhost", "localhost\x00", "loc\xe4lhost", "notlocalhost.example", "[127.0.0.1]",
    ],
)  # fmt: skip
def test_other_names_are_refused(host) -> None:
    wanted = 200 if host == "127.0.0.1." else 403
    assert status(("host", host)) == wanted
    # A page under that name says that it is of the same origin.
    assert status(("host", host), ("origin", f"http://{host}"), JSON) in (wanted, 403)


def test_exactly_one_host_is_wanted() -> None:
    for bound_to in ("127.0.0.1", ALL):
        assert status(JSON, bound_to=bound_to) == 400
        assert status(HOST, HOST, bound_to=bound_to) == 400
        assert status(HOST, JSON, bound_to=bound_to) == 200


def test_names_of_the_operator_are_let_in() -> None:
    hosts = ("LLM.example.", "10.0.0.7", "2001:DB8::1", "[2001:db8::2]")
    for bound_to in ("127.0.0.1", "::1", "localhost", ALL, "10.0.0.7"):
        for host in (
            "llm.example", "LLM.EXAMPLE.:8000", "10.0.0.7:8000", "[2001:db8:0::1]:80",
            "[2001:db8::2]", "localhost",
        ):  # fmt: skip
            assert status(("host", host), bound_to=bound_to, hosts=hosts) == 200, host
        for host in ("example", "a.llm.example", "llm.example.evil", "10.0.0.8"):
            assert status(("host", host), bound_to=bound_to, hosts=hosts) == 403, host
        assert status(("host", "evil"), bound_to=bound_to, hosts=("*",)) == 200


def test_a_server_for_other_machines_has_any_name_unless_it_is_told() -> None:
    for bound_to in (ALL, "::", "", "192.168.0.7", "llm.example"):
        assert status(("host", "whatever.example:1"), bound_to=bound_to) == 200
        assert status(("host", "evil"), bound_to=bound_to, hosts=("good",)) == 403
        foreign = (("host", "good"), ("origin", "http://evil"), JSON)
        assert status(*foreign, bound_to=bound_to) == 403


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),  # TLS ends before the server
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("http://127.0.0.1:8000", 403),
        ("http://localhost:8000.evil.example", 403),
        ("http://localhost:8000@evil.example", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("localhost:8000", 403),
        ("file://", 403),
        ("chrome-extension://abcdef", 403),
    ],
)
def test_only_pages_of_the_server_itself_are_let_in(origin, wanted) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("OPTIONS", "/")):
        assert status(HOST, ("origin", origin), method=method, path=path) == wanted


def test_ports_that_a_browser_leaves_out_are_the_schemes() -> None:
    assert status(("host", "localhost:80"), ("origin", "http://localhost")) == 200
    assert status(("host", "localhost"), ("origin", "http://localhost")) == 200
    assert status(("host", "localhost"), ("origin", "https://localhost")) == 200
    assert status(("host", "localhost:80"), ("origin", "https://localhost")) == 403


def test_origins_of_the_operator_are_let_in_all_or_none() -> None:
    there, evil = ("origin", "http://there:3000"), ("origin", "http://evil")
    named = ("http://There:3000",)
    assert status(HOST, there, CROSS, JSON, LENGTH, origins=named) == 200
    assert status(HOST, evil, CROSS, JSON, LENGTH, origins=named) == 403
    assert status(HOST, there, evil, JSON, LENGTH, origins=named) == 403
    assert status(HOST, ("origin", "null"), JSON, origins=named) == 403
    assert status(HOST, CROSS, method="GET", path="/health", origins=named) == 403
    for headers in ((evil, CROSS), (("origin", "null"),), (CROSS,)):
        assert status(HOST, *headers, JSON, LENGTH, origins=("*",)) == 200


def test_other_sites_may_link_to_pages_and_do_nothing_else() -> None:
    for path in ("/", "/docs"):
        assert status(HOST, CROSS, *LINK, method="GET", path=path) == 200
        frame = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe"))
        assert status(HOST, CROSS, *frame, method="GET", path=path) == 403
        assert status(HOST, CROSS, method="GET", path=path) == 403
        assert status(HOST, CROSS, *LINK, method="POST", path=path) == 403
        evil = ("origin", "http://evil")
        assert status(HOST, CROSS, evil, *LINK, method="GET", path=path) == 403
    for path in ("/health", "/metrics", "/v1/models", "/openapi.json", "/playground/page.js"):
        assert status(HOST, CROSS, *LINK, method="GET", path=path) == 403
    for site in ("same-origin", "same-site", "none"):
        assert status(HOST, ("sec-fetch-site", site), method="GET", path="/health") == 200


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/jsonp", 415),
        ("application/x-www-form-urlencoded", 415),
        (None, 415),
    ],
)
def test_browsers_say_that_json_is_json(kind, wanted) -> None:
    given = () if kind is None else (("content-type", kind),)
    same, site = ("origin", "http://localhost:8000"), ("sec-fetch-site", "same-origin")
    chunked = ("transfer-encoding", "chunked")
    for who in ((same,), (site,), (same, site)):
        for body in (LENGTH, chunked):
            assert status(HOST, *who, *given, body) == wanted
        assert status(HOST, *who, *given, ("content-length", "0"), method="DELETE") == 200
        assert status(HOST, *who, *given, method="DELETE") == 200
    assert status(HOST, *given, LENGTH) == 200, "curl says form, and pages cannot be without Origin"


def test_two_types_are_not_one() -> None:
    same = ("origin", "http://localhost:8000")
    assert status(HOST, same, JSON, ("content-type", "text/plain"), LENGTH) == 415


def test_local_addresses() -> None:
    assert all(map(is_local, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST.")))
    assert not any(map(is_local, ("", ALL, "::", "10.0.0.1", "localhost.example", "[::1]")))
    assert Authority.parse("[::1]:8000") == Authority("::1", 8000)


@pytest.mark.parametrize(
    "name", ["", "a:80", "http://a", "a/", "[::1]:80", "*.a", "a b", "bücher.example", "u@a", "a:"]
)
def test_allowed_hosts_are_names_without_ports(name) -> None:
    with pytest.raises(SettingError, match=r"--allowed-host is .*without port"):
        replace(CONFIG, allowed_hosts=(name,))


def test_a_rebound_name_gets_nothing_but_what_is_allowed(plain) -> None:
    server, http = plain
    for path in ("/", "/docs", "/health", "/metrics", "/v1/models", "/nowhere"):
        reply = http.get(path, headers={"Host": "evil.example:8000"})
        assert reply.status_code == 403
        error = reply.json()["error"]
        assert error["code"] == "host_not_allowed"
        for told in ("'evil.example:8000'", "localhost", "--allowed-host"):
            assert told in error["message"]
    reply = http.post("/v1/completions", json=BODY, headers={"Host": "evil.example"})
    assert reply.status_code == 403
    assert server.host.ready().loop.load.num_running == 0
    told = http.post("/v1/messages", json={}, headers={"Host": "evil.example"}).json()
    assert told["type"] == "error", "as Anthropic's clients read it"
    long = http.get("/health", headers={"Host": "evil" * 5000}).text
    assert len(long) < 500


def test_hosts_on_the_wire(plain) -> None:
    server, _ = plain
    ask = "GET /health HTTP/1.1"
    assert raw_reply(server, ask, "Host: localhost").startswith(b"HTTP/1.1 200")
    assert raw_reply(server, ask).startswith(b"HTTP/1.1 400")
    assert raw_reply(server, "GET /health HTTP/1.0").startswith(b"HTTP/1.1 400")
    twice = raw_reply(server, ask, "Host: localhost", "hOST: localhost")
    assert twice.startswith(b"HTTP/1.1 400")
    assert b"2 Host headers (allowed: exactly one)" in twice
    # A trailer comes after the headers were judged, and is none of them.
    lines = (
        "POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked", "Connection: close", "",
        "0", "Host: localhost",
    )  # fmt: skip
    assert raw_reply(server, *lines).startswith(b"HTTP/1.1 400")


def test_a_cross_site_simple_request_runs_nothing(plain) -> None:
    server, http = plain
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    counted = _replies(http, "403")
    reply = http.post("/v1/completions", content=b'{"prompt":"x"}', headers=page)
    assert reply.status_code == 403
    error = reply.json()["error"]
    assert error["code"] == "origin_not_allowed"
    for told in ("'https://evil.example'", "pages of this server", "--cors-origin"):
        assert told in error["message"]
    assert _replies(http, "403") == counted + 1
    assert server.host.ready().loop.load.num_running == 0
    own = {"Origin": server.url, "Content-Type": "text/plain"}
    assert http.post("/v1/completions", content=b"{}", headers=own).status_code == 415
    ours = http.post("/v1/completions", json=BODY, headers={"Origin": server.url})
    assert ours.status_code == 200
    curl = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = http.post("/v1/completions", content=b'{"prompt":"x","max_tokens":1}', headers=curl)
    assert reply.status_code == 200
    gone = http.delete("/v1/completions/nothing", headers={"Origin": server.url})
    assert gone.status_code == 404, "a request without a body needs no type"


def _replies(http: httpx2.Client, status: str) -> float:
    wanted = f'soloist_http_replies_total{{path="/v1/completions",status="{status}"}} '
    found = [line for line in http.get("/metrics").text.splitlines() if line.startswith(wanted)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_preflights_of_named_origins_alone_are_answered() -> None:
    ask = {
        "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization",
        "Sec-Fetch-Site": "cross-site",
    }  # fmt: skip
    config = {"cors_origins": ("http://there",), "api_keys": (KEY,)}
    with running(lambda _: scripted(Scripted()), **config) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            for path in ("/v1/completions", "/health"):
                reply = http.options(path, headers=ask | {"Origin": "http://there"})
                assert reply.status_code == 200
                assert reply.headers["access-control-allow-origin"] == "http://there"
                other = http.options(path, headers=ask | {"Origin": "http://elsewhere"})
                assert other.status_code == 403
                assert "access-control-allow-origin" not in other.headers
            # Before the key: a page learns nothing about it.
            bad = {"Origin": "http://elsewhere", "Authorization": f"Bearer {KEY}"}
            assert http.get("/v1/models", headers=bad).status_code == 403
            page = {"Origin": "http://there"}
            denied = http.get("/v1/models", headers=page)
            assert denied.status_code == 401
            assert denied.headers["access-control-allow-origin"] == "http://there"
            page["Authorization"] = f"Bearer {KEY}"
            reply = http.post("/v1/completions", json=BODY, headers=page)
            assert reply.status_code == 200
            assert "cross-origin-resource-policy" not in reply.headers


def test_replies_are_not_embedded_framed_or_guessed(plain) -> None:
    server, http = plain
    replies = [http.get(path) for path in ("/", "/docs", "/health", "/nowhere", "/metrics")]
    replies.append(http.post("/v1/completions", json=BODY | {"stream": True}))
    replies.append(http.get("/", headers={"Host": "evil"}))
    for reply in replies:
        assert reply.headers.get_list("x-content-type-options") == ["nosniff"]
        assert reply.headers.get_list("cross-origin-resource-policy") == ["same-origin"]
        assert reply.headers.get_list("x-frame-options") == ["DENY"]
    malformed = raw_reply(server, "nonsense")
    assert b"x-content-type-options: nosniff" in malformed
    for path in ("/", "/docs"):
        policy = http.get(path).headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'none'" in policy
        assert http.get(path).headers["cross-origin-opener-policy"] == "same-origin"


def test_a_mistake_of_ours_is_counted_as_a_reply(plain, monkeypatch) -> None:
    server, http = plain
    monkeypatch.setattr(server.host, "ready", lambda: 1 / 0)
    assert http.post("/v1/completions", json=BODY).status_code == 500
    monkeypatch.undo()
    assert _replies(http, "500") == 1


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"host": "::1"}, []),
        ({"host": ALL, "api_keys": (KEY,), "cors_origins": ("*",)}, []),
        ({"host": ALL}, ["anyone who can reach 0.0.0.0", "DNS rebinding"]),
        ({"host": ALL, "allowed_hosts": ("a",)}, ["anyone who can reach 0.0.0.0"]),
        ({"host": ""}, ["anyone who can reach this machine", "DNS rebinding"]),
        ({"cors_origins": ("*",)}, ["every web page"]),
        ({"allowed_hosts": ("*",)}, ["DNS rebinding"]),
        ({"cors_origins": ("http://there",)}, []),
    ],
)
def test_what_is_open_is_told_at_start(changed, told) -> None:
    found = warnings_of(replace(CONFIG, **changed))
    assert len(found) == len(told)
    for warning, word in zip(found, told, strict=True):
        assert word in warning
        assert "--api-key" in warning
    if changed.get("host") == ALL and told:
        for word in ("generate", "tokenise", "/metrics", "end a request", "--host 127.0.0.1"):
            assert word in found[0]
