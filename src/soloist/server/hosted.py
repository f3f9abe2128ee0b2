"""Tools that run on the servers of OpenAI and Anthropic: clients offer them, none runs here."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Types, with the date of a version behind some: web_search_preview_2025_03_11, web_fetch_20250910.
_HOSTED = re.compile(
    "(web_search|web_search_preview|web_fetch|file_search|code_interpreter|code_execution"
    "|computer|computer_use_preview|image_generation|mcp|mcp_toolset|local_shell|shell|namespace"
    "|tool_search|tool_search_tool_regex|tool_search_tool_bm25)"
    "(_[0-9]{8}|(_[0-9]{2,4}){3})?"
)

Tools = Mapping[int, Mapping[str, Any]]


def without_hosted(tools: Sequence[dict[str, Any]]) -> tuple[Tools, tuple[str, ...]]:
    """The other tools by their numbers in the request, and a warning for each that is left out."""
    kept, warnings = {}, []
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            warnings.append(f"tools[{number}] was left out: type '{kind}' cannot run here")
        else:
            kept[number] = tool
    return kept, tuple(warnings)
