"""The fields and limits in documents are those of the server."""

import re
from pathlib import Path

from typer.main import get_command

from soloist import errors
from soloist.cli.app import app
from soloist.errors import SoloistError
from soloist.server import bounds
from soloist.server.app import ROUTES
from soloist.server.config import ServerConfig
from soloist.server.fields import (
    MOST_CHOICES,
    MOST_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
)
from soloist.server.held import MOST_LARGEST
from soloist.server.preparation.bounds import BOUNDS, MOST_CONTAINERS, Bound
from soloist.server.preparation.messages import MessagesRequest
from soloist.server.preparation.responses import ResponsesRequest

ROOT = Path(__file__).parents[2]
SERVING = (ROOT / "docs" / "serving.md").read_text("utf-8")
SECURITY = (ROOT / "docs" / "security.md").read_text("utf-8")


def rows(heading: str, text: str = SERVING) -> list[list[str]]:
    """Cells of the table with this heading."""
    lines = text[text.index(heading) :].splitlines()[2:]
    table = lines[: lines.index("")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_fields_are_ones_that_requests_have() -> None:
    known = {
        name
        for request in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
        for name in request.model_fields
    }
    table = rows("| field | what it may be |")
    assert len(table) > 10
    for fields, _ in table:
        assert set(re.findall(r"`(\w+)`", fields)) <= known, fields


def test_numbers_of_fields() -> None:
    told = dict(rows("| field | what it may be |"))
    assert told["`n`"].startswith(f"{MOST_CHOICES} answers")
    assert told["`logprobs`, `top_logprobs`"] == f"up to {MOST_TOP_LOGPROBS} alternatives"
    stop = CompletionRequest.model_json_schema()["properties"]
    strings, ids = re.fullmatch(
        r"up to (\d+) strings, (\d+) ids", told["`stop`, `stop_token_ids`"]
    ).groups()
    assert f"'maxItems': {strings}" in str(stop["stop"])
    assert f"'maxItems': {ids}" in str(stop["stop_token_ids"])


def test_limits_are_the_defaults() -> None:
    config = ServerConfig(names=("x",))
    wanted = {
        "--queue": config.most_waiting, "--max-body-mb": config.most_body_bytes / 2**20,
        "--request-timeout": config.request_s, "--shutdown-timeout": config.shutdown_s,
    }  # fmt: skip
    defaults = get_command(app()).commands["serve"].make_context("serve", []).params
    for _, told, option in rows("| limit | default | option |"):
        name = option.strip("`")
        number = float(re.match(r"[\d,]+", told)[0].replace(",", ""))
        assert number == defaults[name[2:].replace("-", "_")]
        assert number == wanted.get(name, number)


def test_bounds_of_fields_are_told() -> None:
    told = {}
    for fields, values, num_bytes in rows("| field | values | bytes |", SECURITY):
        found = None if num_bytes == "context" else int(num_bytes.replace(",", ""))
        bound = Bound(int(values.replace(",", "")), found)
        told |= dict.fromkeys(re.findall(r"`(\w+)`", fields), bound)
    assert told == BOUNDS
    assert f"at most {MOST_CONTAINERS:,} objects and lists" in SECURITY
    assert f"at most {MOST_LARGEST} times" in SECURITY


def test_exit_statuses_are_the_errors() -> None:
    told = {int(status) for status, _, _ in rows("| exit status |", SECURITY)}
    raised = {kind.exit_status for kind in all_kinds(SoloistError)}
    assert raised <= told
    assert told - raised == {0, 1}


def test_every_error_is_drawn() -> None:
    drawn = set(re.findall(r"\w+", errors.__doc__ or ""))
    ours = {kind.__name__ for kind in all_kinds(SoloistError) if kind.__module__ == errors.__name__}
    assert ours <= drawn


def all_kinds(error: type[SoloistError]) -> set[type[SoloistError]]:
    return {error}.union(*map(all_kinds, error.__subclasses__()))


def test_tests_that_hold_promises_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", SECURITY)
    assert len(named) > 12
    for name in named:
        assert (ROOT / name).is_file(), name


def test_bounds_of_connections_are_told() -> None:
    told = [most for _, most in rows("| what a client may do | at most |", SECURITY)]
    assert told == [
        f"{bounds.MOST_CONNECTIONS:,}, or what open files allow",
        f"{bounds.IDLE_S:.0f} s",
        f"{bounds.HEADER_S:.0f} s",
        f"{bounds.BODY_S:.0f} s",
        f"{bounds.READING_S:.0f} s",
        f"{bounds.MOST_HEAD_BYTES // 1024} KiB in {bounds.MOST_HEADERS} headers",
    ]
    assert f"to read {bounds.LEAST_READ_BYTES // 1024} KiB of a reply" in SECURITY


def test_endpoints_are_those_of_the_server() -> None:
    endpoints = SERVING[SERVING.index("\n## Endpoints\n") :]
    told = set(re.findall(r"`(?:DELETE )?(/[\w./]*)`", endpoints))
    served = {route.path for route in ROUTES if "{" not in route.path}
    assert told - {"/v1/chat/completions/ID"} == served
