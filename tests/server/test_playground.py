"""The page at `/`: how it is served, and that nothing in it comes from elsewhere."""

import re
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

from server.running import KEY, Scripted, running, scripted, wait_until_ready
from soloist.server import fields, playground

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src/soloist/server/page"
VENDOR = PAGE / "vendor"
OURS = [file for file in PAGE.iterdir() if file.is_file()]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@pytest.mark.parametrize("path", playground.PATHS)
def test_every_part_is_served(http, path) -> None:
    reply = http.get(path)
    file = PAGE / (path.removeprefix("/playground").lstrip("/") or "index.html")
    assert reply.status_code == 200
    assert reply.content == file.read_bytes()
    assert reply.headers["content-type"] == f"{TYPES[file.suffix]}; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_every_file_is_a_part() -> None:
    names = {path.removeprefix("/playground").lstrip("/") for path in playground.PATHS} - {""}
    files = {str(file.relative_to(PAGE)) for file in PAGE.rglob("*.*") if file.is_file()}
    assert {name for name in files if not name.endswith(".LICENSE")} == names | {"index.html"}


@pytest.mark.parametrize(
    "name",
    ["index.html", "nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "vendor", "vendor/%2e%2e/../x.js"],
)
def test_nothing_else_is_served(http, name) -> None:
    assert http.get(f"/playground/{name}").status_code == 404


def test_a_link_of_another_site_starts_no_demo(http) -> None:
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for site, status in [
        ("none", 200),
        ("same-origin", 200),
        ("same-site", 303),
        ("cross-site", 303),
    ]:
        reply = http.get("/?demo", headers=link | {"Sec-Fetch-Site": site})
        assert reply.status_code == status, site
        assert reply.headers.get("location", ".") == "."
    assert http.get("/", headers=link | {"Sec-Fetch-Site": "cross-site"}).status_code == 200
    assert http.get("/?demo").status_code == 200


def test_the_page_needs_no_key_but_requests_do() -> None:
    with running(lambda _: scripted(Scripted()), api_keys=(KEY,)) as server:
        wait_until_ready(server)
        with httpx2.Client(base_url=server.url, timeout=20) as http:
            assert {http.get(path).status_code for path in playground.PATHS} == {200}
            assert http.get("/v1/models").status_code == 401
            assert http.get("/playground/nothing.js").status_code == 401


def test_nothing_comes_from_elsewhere() -> None:
    examples = {
        *(f"http://127.0.0.1:{port}/v1" for port in (1234, 8001, 8002, 8080, 11434)),
        "http://HOST:PORT/v1",
        "http://host:8000/v1",
        "http://host:8000/v1/",
    }
    for file in OURS:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"\w+://[^\s\"'`)$]+", text)) <= examples, file.name
        assert not re.search(r"\son\w+=|<style|style=|(inner|outer)HTML|insertAdj", text), file.name
        for loaded in re.findall(r"(?:from|href=|src=)\s*\"([^\"]+)\"", text):
            assert loaded.startswith(("./", "playground/", "data:", "docs")), loaded


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in PAGE.rglob("*") if file.is_file()) < 300_000


def test_what_others_wrote_keeps_its_licence() -> None:
    """Every vendored file names its project, whose licence lies beside it."""
    notices = {"marked": "marked v", "highlight": "Highlight.js v"}
    for file in VENDOR.glob("*.js"):
        name = "marked" if file.name == "marked.js" else "highlight"
        text = file.read_text(encoding="utf-8")
        assert "sourceMappingURL" not in text
        if file.stem in notices:
            assert notices[name] in text[:200]
        else:
            assert "hljsGrammar" in text
        assert "Copyright" in (VENDOR / f"{name}.LICENSE").read_text(encoding="utf-8")


def test_sampling_fields_are_ones_that_the_server_takes() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    form = page[page.index('id="settings"') : page.index("</aside>")]
    form = form[: form.index("View and instructions")]
    names = set(re.findall(r'name="(\w+)"', form))
    assert len(names) == 10
    for request in (fields.ChatRequest, fields.CompletionRequest):
        assert names <= set(request.model_fields)


def test_a_model_says_whether_it_fills_in(http) -> None:
    assert http.get("/v1/models").json()["data"][0]["fills_in"] is True


def test_what_the_page_computes() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    script = Path(__file__).with_name("page_test.mjs")
    done = subprocess.run(
        [node, "--test", str(script)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
