"""Agents as they are installed: each does a turn, calls a tool and reads its result.

No program is a requirement of this project: a test is skipped where its program is not on PATH.
They keep what they write in a home of their own, and are told to reach for nothing but the server.
docs/clients.md has the settings.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.running import Scripted, etude, running, scripted, wait_until_ready
from soloist.engine.executor import Picked
from soloist.engine.request import Request
from soloist.server.serve import Server

SAID, SECRET = "It is done.", "forty-two and a half"
READ = "cat notes.txt"


class Caller(Scripted):
    """Calls a tool where a prompt offers it, and says something where it has a result.

    Attributes:
        call: of a tool, by name and arguments; None says something at once.
        prompts: that came.
    """

    def __init__(self) -> None:
        super().__init__(SAID, ends=True)
        self.call: tuple[str, dict[str, Any]] | None = None
        self.prompts: list[str] = []
        self._scripts: dict[Request, list[int]] = {}

    def read(self, running: Request) -> Picked | None:
        tokenizer = etude().tokenizer
        self.prompts.append(tokenizer.decode(running.prompt_ids))
        text, offered = SAID, self.call is not None and f'"{self.call[0]}"' in self.prompts[-1]
        if self.call is not None and offered and SECRET not in self.prompts[-1]:
            name, arguments = self.call
            call = json.dumps({"name": name, "arguments": arguments})
            text = f"<tool_call>\n{call}\n</tool_call>"
        self._scripts[running] = [*tokenizer.encode(text), *sorted(tokenizer.eos_ids)[:1]]
        return super().read(running)

    def _next(self, running: Request) -> Picked:
        self.script = self._scripts[running]
        return super()._next(running)

    def free(self, request: Request) -> None:
        self._scripts.pop(request, None)
        super().free(request)


@dataclass(frozen=True)
class Program:
    """How a program is told of a server, and what it is asked.

    Attributes:
        command: its words; {url} and {home} stand for the server's and its home's.
        files: in its home, which settings it reads.
        settings: of its environment.
        call: what runs a command of the shell in it.
    """

    command: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    call: tuple[str, dict[str, Any]] | None = None


CODEX = """
model = "soloist"
model_provider = "soloist"

[model_providers.soloist]
name = "Soloist"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE = """
{"autoupdate": false, "share": "disabled", "model": "soloist/soloist",
 "small_model": "soloist/soloist",
 "provider": {"soloist": {
   "npm": "@ai-sdk/openai-compatible", "name": "Soloist", "options": {"baseURL": "{url}/v1"},
   "models": {"soloist": {"name": "Soloist", "limit": {"context": 65536, "output": 512}}}}}}
"""
CONTINUE = """
name: Local
version: 1.0.0
schema: v1
models:
  - {name: Soloist, provider: openai, model: soloist, apiBase: "{url}/v1", apiKey: none}
"""
PROGRAMS = {
    "codex": Program(
        ("codex", "exec", "--skip-git-repo-check", "Read the notes"),
        {".codex/config.toml": CODEX},
        call=("exec_command", {"cmd": READ}),
    ),
    "claude": Program(
        ("claude", "-p", "Read the notes", "--allowedTools", "Bash"),
        settings={
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none",
            **dict.fromkeys(
                ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"), "soloist"
            ),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        call=("Bash", {"command": READ, "description": "Reads"}),
    ),
    "opencode": Program(
        ("opencode", "run", "Read the notes"),
        {".config/opencode/opencode.json": OPENCODE},
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        call=("bash", {"command": READ, "description": "Reads"}),
    ),
    "cn": Program(
        ("cn", "-p", "Read the notes", "--allow", "Bash", "--config", "{home}/config.yaml"),
        {"config.yaml": CONTINUE},
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        call=("Bash", {"command": READ}),
    ),
    "aider": Program(
        (
            "aider", "--model", "openai/soloist", "--message", "Say something", "--yes-always",
            "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings",
            "--no-show-release-notes",
        ),
        settings={
            "OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Caller, Server]]:
    """The shipped model's template and tokens, with room for an agent's prompt."""
    caller = Caller()
    with running(lambda _: scripted(caller, 65_536), names=("soloist",)) as server:
        yield caller, wait_until_ready(server)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_turn(served, name: str, tmp_path: Path) -> None:
    program, (caller, server) = PROGRAMS[name], served
    if (path := shutil.which(program.command[0])) is None:
        pytest.skip(f"{program.command[0]} is not on PATH")
    home, project = tmp_path / "home", tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_text(f"{SECRET}\n")

    def placed(text: str) -> str:
        return text.replace("{url}", server.url).replace("{home}", str(home))

    for place, text in {**program.files, ".keep": ""}.items():
        (home / place).parent.mkdir(parents=True, exist_ok=True)
        (home / place).write_text(placed(text))
    caller.call, caller.prompts = program.call, []
    settings = {k: placed(v) for k, v in program.settings.items()}
    done = subprocess.run(
        [path, *map(placed, program.command[1:])],
        cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert SAID in done.stdout, done.stderr
    if program.call is not None:
        assert any(SECRET in prompt for prompt in caller.prompts), "the model read the result"
    failed = [e for e in server.host.metrics.text().decode().splitlines() if 'status="4' in e]
    assert not failed
