"""The README's fields and limits are the server's."""

import re
from pathlib import Path

from typer.main import get_command

from soloist.cli.app import app
from soloist.server.config import ServerConfig
from soloist.server.fields import (
    MOST_CHOICES,
    MOST_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
)
from soloist.server.preparation.messages import MessagesRequest
from soloist.server.preparation.responses import ResponsesRequest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table with this heading."""
    lines = README[README.index(heading) :].splitlines()[2:]
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
    defaults = get_command(app).commands["serve"].make_context("serve", []).params
    for _, told, option in rows("| limit | default | option |"):
        name = option.strip("`")
        number = float(re.match(r"[\d,]+", told)[0].replace(",", ""))
        assert number == defaults[name[2:].replace("-", "_")]
        assert number == wanted.get(name, number)
