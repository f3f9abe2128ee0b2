"""A start imports what its command and its model need, and a server what its requests will need."""

import subprocess
import sys

import pytest

from soloist.cli.app import app

# What a folder of plain safetensors and a prompt that is no conversation do without. A name stands
# for all modules below it as well.
NOT_FOR_A_PLAIN_MODEL = {
    "other formats": (
        "soloist.gguf.header", "soloist.gguf.splits", "soloist.model.gguf.configuration",
        "soloist.model.gguf.promise", "soloist.model.gguf.tensors", "soloist.text.gguf",
    ),
    "quantised files": (
        "soloist.model.quantization.auto_round", "soloist.model.quantization.awq",
        "soloist.model.quantization.compressed_tensors", "soloist.model.quantization.fp8",
        "soloist.model.quantization.gguf", "soloist.model.quantization.gptq",
        "soloist.model.quantization.matrices", "soloist.model.quantization.modelopt",
        "soloist.model.quantization.scheme", "soloist.weights.decoding",
        "soloist.weights.numbers", "soloist.weights.quantizing",
    ),
    "adapters": ("soloist.model.adapter", "soloist.model.lora", "soloist.weights.merging"),
    "other families": (
        "soloist.model.families.gemma3", "soloist.model.families.glm",
        "soloist.model.families.laneformer", "soloist.model.families.llama",
        "soloist.model.families.mistral3", "soloist.model.families.phi3",
    ),
    "chat templates": ("jinja2", "soloist.text.chat", "soloist.text.jinja"),
    "grammars": ("llguidance", "soloist.text.grammar"),
    "servers": ("soloist.engine.loop", "soloist.server", "starlette", "uvicorn"),
    "other commands": (
        "soloist.bench", "soloist.cli.commands.analyse", "soloist.cli.commands.bench",
        "soloist.cli.commands.serve", "soloist.deploy", "soloist.planning",
    ),
    "the hub": ("httpx", "httpx2", "huggingface_hub"),
    "a GPU": ("soloist.engine.kernel", "soloist.megakernel.decoder", "soloist.prefill.runner"),
}  # fmt: skip


def modules_after(code: str) -> set[str]:
    """Names of all modules that a fresh process has imported once it has run `code`."""
    ending = "finally:\n    import sys\n    print('\\n'.join(['modules:', *sys.modules]))\n"
    done = subprocess.run(
        [sys.executable, "-c", f"try:\n    {code}\n{ending}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("modules:\n")[2].split())


@pytest.fixture(scope="module")
def after_a_run() -> set[str]:
    arguments = ["run", "etude", "--prompt", "def f", "--max-tokens", "1", "--device", "cpu"]
    return modules_after(f"from soloist.cli import main; main({arguments})")


@pytest.mark.parametrize("what", NOT_FOR_A_PLAIN_MODEL)
def test_a_run_does_not_import(after_a_run: set[str], what: str) -> None:
    assert "soloist.engine.engine" in after_a_run, "it ran"
    unwanted = NOT_FOR_A_PLAIN_MODEL[what]
    assert not [
        module
        for module in after_a_run
        if any(module == name or module.startswith(f"{name}.") for name in unwanted)
    ]


def test_names_of_unwanted_modules_are_right() -> None:
    names = [name for names in NOT_FOR_A_PLAIN_MODEL.values() for name in names]
    own = [name for name in names if name.startswith("soloist.")]
    assert set(own) <= modules_after("import " + ", ".join(own))


def test_a_server_has_templates_and_grammars_before_its_first_request() -> None:
    wanted = {"jinja2", "llguidance", "soloist.text.chat", "soloist.text.grammar"}
    assert wanted <= modules_after("import soloist.cli.serving")
    # Children of this process have what it has once it says that it is ready.
    loading = (
        "from soloist.model.folder import shipped_folder;"
        "from soloist.server.preparation.fork_server import loaded;"
        "from soloist.text.processor import ProcessorFiles;"
        "loaded(ProcessorFiles(shipped_folder('etude'), 8192, 8192))"
    )
    assert wanted <= modules_after(loading)


def test_the_command_that_runs_is_the_only_one() -> None:
    for name, commands, groups in (("run", 1, 0), ("bench", 0, 1), ("deploy", 0, 1)):
        made = app(name)
        assert (len(made.registered_commands), len(made.registered_groups)) == (commands, groups)
    whole = app()
    for other in ("", "--help", "rnu"):
        made = app(other)
        assert len(made.registered_commands) == len(whole.registered_commands) > 1
        assert len(made.registered_groups) == len(whole.registered_groups) > 1
