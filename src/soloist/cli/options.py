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
    typer.Option(help="Of weights and KV cache: auto, fp32, bf16, fp16.", rich_help_panel=_MODEL),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens of context to make room for; default: the model's own, as far as it fits.",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of a hub model.", rich_help_panel=_MODEL),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Most new tokens.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the likeliest tokens that make up this share.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Keep tokens at least this likely, relative to the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(help="Divide logits of tokens seen before.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float,
    typer.Option(help="Subtract from logits of tokens made before.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="The same, once for every time.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Same seed, same text; drawn if absent.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
]
StopId = Annotated[
    list[int] | None,
    typer.Option(help="End with this token id; may be repeated.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID:BIAS",
        help="Add to the logit of a token id; may be repeated.",
        rich_help_panel=_SAMPLING,
    ),
]
MinTokens = Annotated[
    int, typer.Option(help="No end before this many tokens.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel=_SAMPLING),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="JSON on stdout, nothing else.", rich_help_panel=_OUTPUT),
]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write the rows to this JSON file.", rich_help_panel=_OUTPUT
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        help="Compare with this file's rows; exit status 4 if something became slower.",
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
    typer.Option(help="Beside the measurement, run so many processes that only count."),
]
Shape = Annotated[
    Path | None,
    typer.Option(help="Instead of a model, a config.json: random weights.", rich_help_panel=_MODEL),
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
                raise SettingError(name, value, "beside --shape only", "name a config.json")
        return
    for name, unused in (("MODEL", model), ("--against", against)):
        if unused is not None:
            raise SettingError(name, unused, "without --shape, which has random weights")


def check_only_one(shape: Path | None, model: str | None) -> None:
    """A shape or a model.

    Raises:
        SettingError: both are there.
    """
    if shape is not None and model is not None:
        raise SettingError("MODEL", model, "without --shape, which has random weights")


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
                raise SettingError(name, str(given[name]), allowed, "leave one of them out")

    if source is not None:
        refuse(
            tuple(name for name in given if name != "--picture"),
            "not beside --from, which makes no new trace",
        )
    if given["--ablations"] is not None:
        refuse(("--output", "--picture"), "not beside --ablations, which makes no trace")
    if given["--shape"] is not None:
        refuse(("MODEL", "--prompt"), "not beside --shape, which has random weights and tokens")
    else:
        refuse(("--context",), "beside --shape only")


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
