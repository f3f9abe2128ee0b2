"""GET /: the playground, one page and its parts, which load nothing from elsewhere."""

from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

_PAGE = "index.html"
_PARTS = (
    "style.css", "page.js", "ask.js", "chat.js", "code.js", "complete.js", "conversations.js",
    "examples.js", "figures.js", "forms.js", "later.js", "markdown.js", "pane.js", "picture.js",
    "pieces.js", "prepare.js", "race.js", "raw.js", "recording.js", "rivals.js", "server.js",
    "share.js", "sse.js", "storage.js", "stream.js", "strip.js", "tokens.js", "verdict.js",
    "views.js",
    "vendor/marked.js", "vendor/highlight.js", "vendor/bash.js", "vendor/c.js", "vendor/cpp.js",
    "vendor/diff.js", "vendor/go.js", "vendor/java.js", "vendor/javascript.js", "vendor/json.js",
    "vendor/python.js", "vendor/rust.js", "vendor/sql.js", "vendor/typescript.js",
    "vendor/xml.js", "vendor/yaml.js",
)  # fmt: skip
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

# A browser fetches them before anybody has typed a key.
PATHS = ("/", *(f"/playground/{name}" for name in _PARTS))

_HEADERS = {
    # Scripts and styles come from here alone, and no text is ever read as markup; the race may talk
    # to any server its user names.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    # A page elsewhere that opened this one gets no hold of its window.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """The page. `?demo` makes it send an example by itself, but not where another site's link led.

    Browsers say whose link it was, and pages cannot change it. No header at all is no browser.
    """
    is_ours = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    if "demo" in request.query_params and not is_ours:
        return RedirectResponse(".", 303)
    return _reply(_PAGE)


async def part(request: Request) -> Response:
    """A script or the style sheet of the page."""
    name = request.path_params["name"]
    if name not in _PARTS:
        raise HTTPException(404)
    return _reply(name)


def _reply(name: str) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_read(name), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


@cache
def _read(name: str) -> bytes:
    return files("soloist.server").joinpath("page", *name.split("/")).read_bytes()
