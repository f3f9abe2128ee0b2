"""The options that several commands share, each written once."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from soloist.errors import SettingError
from soloist.model.quantized import AT_LOAD, Codes

if TYPE_CHECKING:
    from soloist.bench.rows import Prefix

_Choice = TypeVar("_Choice")
WITH_SHAPE, COST = "With --shape", "Cost"
_MODEL, _SAMPLING, _OUTPUT = "Model", "Sampling", "Output"

Model = Annotated[
    str,
    typer.Argument(
        help="A folder, a hub id (owner/name), or a shipped model: etude, etude-draft.",
        show_default=True,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        help="A folder, a hub id (owner/name), or a shipped model: etude, etude-draft.",
        show_default="etude",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL)]
Gpus = Annotated[
    str,
    typer.Option(
        help="GPUs that run the model together: 1, 2, 4, 8, or auto for as many as can.",
        rich_help_panel=_MODEL,
    ),
]
Precision = Annotated[
    str,
    typer.Option(help="Weights and KV cache: auto, fp32, bf16 or fp16.", rich_help_panel=_MODEL),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Quantise the layers' matrices: int4 (128 columns of a row share a scale), int8 or "
        "fp8 (all columns do).",
        rich_help_panel=_MODEL,
    ),
]
HeadWeights = Annotated[
    str | None,
    typer.Option(
        help="Quantise the LM head too: int4, int8 or fp8; default: it stays in 16 bits.",
        rich_help_panel=_MODEL,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Context length in tokens; default: the model's own, or as much as fits.",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=_MODEL),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", help="Most tokens to generate.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", help="Sampling temperature; 0 is greedy.", rich_help_panel=_SAMPLING
    ),
]
TopK = Annotated[
    int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the likeliest tokens that add up to this probability.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens below this share of the highest probability.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Factor by which tokens of prompt and answer become less likely.",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Subtract this from logits of tokens already in the answer.",
        rich_help_panel=_SAMPLING,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        help="Subtract this once for each time that a token is in the answer.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text; default: random.", rich_help_panel=_SAMPLING
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
StopId = Annotated[
    list[int] | None,
    typer.Option(help="Stop at this token id; may be repeated.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID:BIAS",
        help="Add BIAS to the logit of token ID; may be repeated.",
        rich_help_panel=_SAMPLING,
    ),
]
MinTokens = Annotated[
    int, typer.Option(help="Do not stop before this many tokens.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Do not stop at the end-of-sequence token.", rich_help_panel=_SAMPLING
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print only JSON on stdout.", rich_help_panel=_OUTPUT),
]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write the results to this JSON file.", rich_help_panel=_OUTPUT
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        help="Compare with this result file; exit status 4 if anything became slower.",
        rich_help_panel=_OUTPUT,
    ),
]
Threshold = Annotated[
    float,
    typer.Option(
        help="Share by which a median may be worse than the baseline's.",
        rich_help_panel=_OUTPUT,
    ),
]
Busy = Annotated[
    int,
    typer.Option(help="Load the CPU with so many busy processes during the measurement."),
]
Shape = Annotated[
    Path | None,
    typer.Option(
        help="A config.json, with random weights, instead of a model.", rich_help_panel=_MODEL
    ),
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", help="Prompt text; default: Python source code.")
]
DecodeFrom = Annotated[
    int | None,
    typer.Option(
        help="Decode from this position on, over a random KV cache.", rich_help_panel=WITH_SHAPE
    ),
]
Runs = Annotated[int, typer.Option(help="Timed runs after one to warm up.")]
Utilisation = Annotated[
    float,
    typer.Option(
        help="Share of the paid hours in which the machine serves requests.", rich_help_panel=COST
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


def parsed_gpus(given: str) -> int | Literal["auto"]:
    """How many, or an error that names the allowed counts."""
    return chosen("--gpus", given, _GPUS)
