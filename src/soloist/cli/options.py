"""The options that several commands share, each written once."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from soloist.cli.terminal import status
from soloist.errors import SettingError
from soloist.model.kv_format import KV_FORMATS, KvName
from soloist.model.quantized import AT_LOAD, Codes

if TYPE_CHECKING:
    from soloist.bench.rows import Prefix

_Choice = TypeVar("_Choice")
_MODEL_HELP = (
    "A folder, a GGUF file, a hub id (owner/name, or owner/name:Q4_K_M), or a shipped model: "
    "etude, etude-draft."
)

# Options by the panel of `--help` that lists them.
_model = partial(typer.Option, rich_help_panel="Model")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_output = partial(typer.Option, rich_help_panel="Output")
with_shape = partial(typer.Option, rich_help_panel="With --shape")
cost = partial(typer.Option, rich_help_panel="Cost")

Model = Annotated[str, typer.Argument(help=_MODEL_HELP, show_default=True)]
OptionalModel = Annotated[str | None, typer.Argument(help=_MODEL_HELP, show_default="etude")]
Device = Annotated[str, _model(help="auto, cpu, cuda or cuda:N.")]
Gpus = Annotated[
    str, _model(help="GPUs that run the model together: 1, 2, 4, 8, or auto for as many as can.")
]
Precision = Annotated[str, _model(help="Weights and KV cache: auto, fp32, bf16 or fp16.")]
Kv = Annotated[
    str | None,
    _model(
        help="Keep keys and values in fewer bits: int8, fp8 or int4; default: as --precision says. "
        "On the decode kernel with bf16 only."
    ),
]
Weights = Annotated[
    str | None,
    _model(
        help="Quantise the layers' matrices: int4 (up to 128 columns of a row share a scale), "
        "int8 or fp8 (all columns do)."
    ),
]
HeadWeights = Annotated[
    str | None,
    _model(help="Quantise the LM head too: int4, int8 or fp8; default: it stays in 16 bits."),
]
PackedPrompts = Annotated[
    bool | None,
    typer.Option(
        "--packed-prompts/--no-packed-prompts",
        help="Read prompts from the packed weights, one copy in memory (one Hopper GPU), or "
        "from rows beside them.",
        show_default="packed where it runs",
    ),
]
UnpackPrompts = Annotated[
    bool,
    typer.Option(
        "--unpack-prompts",
        help="Unpack each matrix when prompts need it, in place of rows beside the packed weights "
        "where these fit: slower, in less memory.",
    ),
]
EightBitPrompts = Annotated[
    bool,
    typer.Option(
        "--eight-bit-prompts",
        help="With --packed-prompts: round activations of prompts to FP8 where matrices are "
        "FP8 with one scale per row (for models made for it; an experiment).",
    ),
]
Context = Annotated[
    int | None,
    _model(help="Context length in tokens; default: the model's own, or as much as fits."),
]
Revision = Annotated[str | None, _model(help="Branch, tag or commit of a hub model.")]
Adapter = Annotated[
    str | None,
    _model(
        metavar="FOLDER_OR_ID",
        help="Merge a LoRA into the model while it is loaded: a folder or hub id in peft's form.",
    ),
]
AcceptField = Annotated[
    list[str] | None,
    _model(
        metavar="NAME",
        help="Let a field of config.json, or a key of a GGUF file, pass that Soloist does not "
        "know, if you know that it changes nothing; may be repeated.",
    ),
]
Shape = Annotated[
    Path | None, _model(help="A config.json, with random weights, instead of a model.")
]
MaxTokens = Annotated[int, _sampling("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[
    float, _sampling("--temperature", "-t", help="Sampling temperature; 0 is greedy.")
]
TopK = Annotated[int | None, _sampling(help="Keep the k likeliest tokens.")]
TopP = Annotated[
    float, _sampling(help="Keep the likeliest tokens that add up to this probability.")
]
MinP = Annotated[float, _sampling(help="Drop tokens below this share of the highest probability.")]
RepetitionPenalty = Annotated[
    float, _sampling(help="Factor by which tokens of prompt and answer become less likely.")
]
PresencePenalty = Annotated[
    float, _sampling(help="Subtract this from logits of tokens already in the answer.")
]
FrequencyPenalty = Annotated[
    float, _sampling(help="Subtract this once for each time that a token is in the answer.")
]
Seed = Annotated[int | None, _sampling(help="The same seed gives the same text; default: random.")]
Stop = Annotated[list[str] | None, _sampling(help="Stop before this text; may be repeated.")]
StopId = Annotated[list[int] | None, _sampling(help="Stop at this token id; may be repeated.")]
LogitBias = Annotated[
    list[str] | None,
    _sampling(metavar="ID:BIAS", help="Add BIAS to the logit of token ID; may be repeated."),
]
MinTokens = Annotated[int, _sampling(help="Do not stop before this many tokens.")]
IgnoreEos = Annotated[
    bool, _sampling("--ignore-eos", help="Do not stop at the end-of-sequence token.")
]
Json = Annotated[bool, _output("--json", help="Print only JSON on stdout.")]
Output = Annotated[
    Path | None, _output("--output", "-o", help="Write the results to this JSON file.")
]
Baseline = Annotated[
    Path | None,
    _output(help="Compare with this result file; exit status 4 if anything became slower."),
]
Threshold = Annotated[
    float, _output(help="Share by which a median may be worse than the baseline's.")
]
Busy = Annotated[
    int, typer.Option(help="Load the CPU with so many busy processes during the measurement.")
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", help="Prompt text; default: Python source code.")
]
DecodeFrom = Annotated[
    int | None, with_shape(help="Decode from this position on, over a random KV cache.")
]
Runs = Annotated[int, typer.Option(help="Timed runs after one to warm up.")]
Utilisation = Annotated[
    float, cost(help="Share of the paid hours in which the machine serves requests.")
]

Speculate = Annotated[
    str,
    _model(
        help="auto: draft tokens and check several in a step, where that pays; off. "
        "No token depends on it."
    ),
]

DEFAULT_MODEL = "etude"
THRESHOLD = 0.05

PREFIXES: "dict[str, tuple[Prefix, ...]]" = {
    "cold": ("cold",), "warm": ("warm",), "both": ("cold", "warm"),
}  # fmt: skip
_PRECISIONS: dict[str, Literal["auto", "fp32", "bf16", "fp16"]] = {
    "auto": "auto", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16",
}  # fmt: skip
_GPUS: dict[str, int | Literal["auto"]] = {"1": 1, "2": 2, "4": 4, "8": 8, "auto": "auto"}


def chosen(option: str, given: str, choices: Mapping[str, _Choice]) -> _Choice:
    """What a word means.

    Args:
        option: its name.
        given: the word.
        choices: all words, with what they mean.

    Raises:
        SettingError: it is none of them.
    """
    if given not in choices:
        raise SettingError(option, given, ", ".join(choices))
    return choices[given]


def checked_precision(given: str) -> Literal["auto", "fp32", "bf16", "fp16"]:
    """The option's value, or an error that names the allowed ones."""
    return chosen("--precision", given, _PRECISIONS)


def checked_weights(given: str | None) -> Codes | None:
    """What --weights names, or an error that names the allowed ones."""
    return None if given is None else chosen("--weights", given, AT_LOAD)


def checked_head_weights(given: str | None) -> Codes | None:
    """What --head-weights names, or an error that names the allowed ones."""
    return None if given is None else chosen("--head-weights", given, AT_LOAD)


def checked_kv(given: str | None) -> KvName | None:
    """What --kv names, or an error that names the allowed ones."""
    return None if given is None else chosen("--kv", given, {name: name for name in KV_FORMATS})


def accepted_fields(
    given: Sequence[str] | None, shape: Path | None = None, *, told: bool = True
) -> tuple[str, ...]:
    """The fields that --accept-field names, each once.

    Args:
        given: the option's values.
        shape: a configuration that stands for a model.
        told: say on stderr that they are accepted; not where a start line does.

    Raises:
        SettingError: there are some, and no model whose they are.
    """
    names = tuple(dict.fromkeys(given or ()))
    if names and shape is not None:
        raise SettingError(
            "--accept-field", names[0], "only without --shape",
            "remove the field from a copy of the file",
        )  # fmt: skip
    if names and told:
        status(f"accepted fields of config.json: {', '.join(names)}")
    return names


def speculates(given: str) -> bool:
    """What --speculate says, or an error that names the allowed words."""
    return chosen("--speculate", given, {"auto": True, "off": False})


def parsed_gpus(given: str) -> int | Literal["auto"]:
    """How many, or an error that names the allowed counts."""
    return chosen("--gpus", given, _GPUS)
