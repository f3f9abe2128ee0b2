"""`soloist run` and `soloist chat`: their options."""

from pathlib import Path
from typing import Annotated

import typer

from soloist.cli import options as o
from soloist.errors import SettingError


def run(
    model: o.Model = "etude",
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to continue; '-' reads it from stdin."),
    ] = None,
    suffix: Annotated[
        str | None,
        typer.Option(help="Text after the gap, for models trained to fill in the middle."),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text that the answer will mostly repeat, such as a file that it edits: the same "
            "answer, sooner.",
        ),
    ] = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    logit_bias: o.LogitBias = None,
    stop: o.Stop = None,
    stop_id: o.StopId = None,
    min_tokens: o.MinTokens = 0,
    ignore_eos: o.IgnoreEos = False,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    context: o.Context = None,
    revision: o.Revision = None,
    adapter: o.Adapter = None,
    accept_field: o.AcceptField = None,
    speculate: o.Speculate = "auto",
    json: o.Json = False,
) -> None:
    """Generate text from a prompt and show the speed.

    The text streams to stdout. Time to first token, decode speed and totals go to stderr.
    """
    from soloist.cli.early import begin

    upload = begin(model, device, gpus, revision)
    from soloist.cli import generation
    from soloist.engine import EngineConfig
    from soloist.sampling import SamplingParams

    drafts = o.speculates(speculate)
    if prediction is not None and not drafts:
        raise SettingError("--prediction", str(prediction), "only without --speculate off")
    predicted = None if prediction is None else generation.read_prediction(prediction)
    text = generation.read_prompt(prompt)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        logit_bias=_parsed_bias(logit_bias),
        stop=tuple(stop or ()),
        stop_token_ids=frozenset(stop_id or ()),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    checked = o.checked_precision(precision)
    # One request: what others would need is not worth waiting for.
    asked = EngineConfig(
        model, device, checked, context, revision, prepare=False, gpus=o.parsed_gpus(gpus),
        weights=o.checked_weights(weights), head_weights=o.checked_head_weights(head_weights),
        kv=o.checked_kv(kv),
        accepted_fields=o.accepted_fields(accept_field, told=False), adapter=adapter,
        speculates=drafts,
    )  # fmt: skip
    generation.run(asked, text, suffix, params, upload, as_json=json, prediction=predicted)


def chat(
    model: o.Model = "etude",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
    device: o.Device = "auto",
    gpus: o.Gpus = "1",
    precision: o.Precision = "auto",
    weights: o.Weights = None,
    head_weights: o.HeadWeights = None,
    kv: o.Kv = None,
    context: o.Context = None,
    revision: o.Revision = None,
    adapter: o.Adapter = None,
    accept_field: o.AcceptField = None,
    speculate: o.Speculate = "auto",
) -> None:
    """Chat with a model, using its own chat template.

    Ctrl-C ends an answer, /reset forgets the conversation, /exit or Ctrl-D quits.
    """
    from soloist.cli.early import begin

    upload = begin(model, device, gpus, revision)
    from soloist.cli import conversation
    from soloist.engine import EngineConfig
    from soloist.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
    )
    # Every turn begins as the last one did.
    asked = EngineConfig(
        model, device, o.checked_precision(precision), context, revision,
        keeps_prefixes=True, host_cache_bytes=0, gpus=o.parsed_gpus(gpus),
        weights=o.checked_weights(weights), head_weights=o.checked_head_weights(head_weights),
        kv=o.checked_kv(kv),
        accepted_fields=o.accepted_fields(accept_field, told=False), adapter=adapter,
        speculates=o.speculates(speculate),
    )  # fmt: skip
    conversation.chat(asked, system, params, upload)


def _parsed_bias(given: list[str] | None) -> dict[int, float]:
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
