"""The options that several commands share, each written once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from soloist.errors import SettingError

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

DEFAULT_MODEL = "etude"
THRESHOLD = 0.05

_PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def checked_precision(given: str) -> Literal["auto", "fp32", "bf16", "fp16"]:
    """The option's value, or an error that names the allowed ones."""
    if given not in _PRECISIONS:
        raise SettingError("--precision", given, ", ".join(_PRECISIONS))
    return given  # type: ignore[return-value]  # the line above narrowed it


def parsed_gpus(given: str) -> int | Literal["auto"]:
    """How many, or an error that names the allowed counts."""
    if given == "auto":
        return "auto"
    if given not in ("1", "2", "4", "8"):
        raise SettingError("--gpus", given, "1, 2, 4, 8, auto")
    return int(given)


def check_shape(
    shape: Path | None,
    model: str | None,
    against: str | None,
    columns: int,
    sequences: int,
    context: int | None,
) -> None:
    """Options of `bench decode` that go with --shape, and those that do not.

    Raises:
        SettingError: one is there that would have no effect.
    """
    if shape is None:
        for name, value, off in (
            ("--columns", columns, 1),
            ("--sequences", sequences, 1),
            ("--context", context, None),
        ):
            if value != off:
                raise SettingError(name, value, "only with --shape", "add --shape config.json")
        return
    for name, unused in (("MODEL", model), ("--against", against)):
        if unused is not None:
            raise SettingError(name, unused, "only without --shape, which uses random weights")


def check_only_one(shape: Path | None, model: str | None) -> None:
    """A shape or a model.

    Raises:
        SettingError: both are there.
    """
    if shape is not None and model is not None:
        raise SettingError("MODEL", model, "only without --shape, which uses random weights")


def unless(default: object, value: object) -> object | None:
    """The value, or None where it is the default."""
    return None if value == default else value


def check_trace(source: Path | None, given: dict[str, object | None]) -> None:
    """Options of `trace` that exclude each other; `given` maps names to values, None where absent.

    Raises:
        SettingError: one is there that would have no effect.
    """

    def refuse(names: tuple[str, ...], allowed: str) -> None:
        for name in names:
            if given[name] is not None:
                raise SettingError(name, str(given[name]), allowed, "leave one of the options out")

    if source is not None:
        refuse(
            tuple(name for name in given if name != "--picture"),
            "not with --from, which shows an existing trace",
        )
    if given["--ablations"] is not None:
        refuse(("--output", "--picture"), "not with --ablations, which makes no trace")
    if given["--shape"] is not None:
        refuse(("MODEL", "--prompt"), "not with --shape, which uses random weights and tokens")
    else:
        refuse(("--context",), "only with --shape")


def parsed_bias(given: list[str] | None) -> dict[int, float]:
    """Token id → bias from words of the form ID:BIAS."""
    biases: dict[int, float] = {}
    for word in given or ():
        token_id, _, bias = word.partition(":")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise SettingError(
                "--logit-bias", word, "ID:BIAS, such as 123:-5", "write one --logit-bias per token"
            ) from None
    return biases
