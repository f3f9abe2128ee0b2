"""How texts that are to be continued become prompts."""

from soloist.sampling.params import Scores
from soloist.server.fields import MOST_CHOICES, CompletionRequest
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import invalid, unsupported
from soloist.server.prompts import completion_prompts
from soloist.server.shapes import plain_grammar, shape_of
from soloist.text.processor import Processor

_DEFAULT_TOKENS = 16  # as OpenAI has it


def prepare_completions(
    processor: Processor, asked: CompletionRequest, model: str
) -> Prepared[CompletionRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    asked.check_together()
    if asked.scores_prompt and asked.suffix is not None:
        raise unsupported("suffix beside echo and logprobs", "a prompt without one")
    shape = shape_of(asked)
    wanted = _DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    scores: Scores = "both" if asked.scores_prompt else "answer"
    if asked.scores_prompt and wanted == 0:
        scores = "prompt"
    params = asked.params(1 if scores == "prompt" else wanted)
    params.check_vocabulary(processor.vocab_size)
    prompts = completion_prompts(processor, asked)
    if (count := len(prompts) * (asked.n or 1)) > MOST_CHOICES:
        raise invalid("n", f"{count} answers in all (allowed: at most {MOST_CHOICES})")
    for ids in prompts:
        processor.check_prompt(ids, wanted)
    grammar = plain_grammar(processor, shape)
    answers = tuple(
        PreparedPrompt(tuple(ids), params, asked.logprobs, scores=scores) for ids in prompts
    )
    without: dict[str, object] = dict.fromkeys(_MAKES_THE_PROMPT)
    if not asked.echo:
        without["prompt"] = ""
    return Prepared(asked.model_copy(update=without), model, answers, grammar)


# Of no use to the reply, and long.
_MAKES_THE_PROMPT = (
    "suffix", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "logit_bias", "stop", "metadata",
)  # fmt: skip
