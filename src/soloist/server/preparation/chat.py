"""How a chat becomes a prompt."""

from soloist.server.fields import ChatRequest
from soloist.server.hosted import without_hosted
from soloist.server.part_formats import PROMPT_END, check_tools, part_format, shown_ids
from soloist.server.preparation.llama_sampling import require_all_listed
from soloist.server.preparation.prepared import Prepared, PreparedPrompt
from soloist.server.problems import invalid
from soloist.server.prompts import chat_prompt, fitted
from soloist.server.reasoning import effort_warnings, reasoning_variables
from soloist.server.shapes import ToolUse, grammar_of, openai_choice, shape_of
from soloist.text.processor import Processor


def prepare_chat(processor: Processor, asked: ChatRequest, model: str) -> Prepared[ChatRequest]:
    """What to ask of the engine.

    Raises:
        Problem, UserError: the request cannot be answered.
    """
    asked.check_together()
    require_all_listed(asked, asked.samplers)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "only with logprobs: true")
    if asked.prediction is not None and (asked.n or 1) > 1:
        raise invalid("prediction", f"only with n 1, not {asked.n}: it predicts one answer")
    shape, (use, warnings) = shape_of(asked), _tool_use(asked)
    wanted = asked.max_completion_tokens
    if wanted is None:
        wanted = asked.max_tokens
    elif asked.max_tokens not in (None, wanted):
        raise invalid("max_tokens", f"contradicts max_completion_tokens, which is {wanted}")
    # Checked before the prompt: a bad value is a bad value, however long the prompt is.
    params = asked.params(max(1, processor.context_tokens) if wanted is None else wanted)
    params.check_vocabulary(processor.vocab_size)
    style = part_format(processor, use.tools)
    variables = reasoning_variables(
        processor, "reasoning_effort", asked.reasoning_effort, asked.chat_template_kwargs or {}
    )
    text = chat_prompt(processor, asked, use.tools or None, variables)
    prompt_ids = processor.encode(text, add_special_tokens=False)
    params = fitted(processor, prompt_ids, params, wanted)
    top_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    end = text[-PROMPT_END:]
    grammar = grammar_of(processor, shape, use, style, end)
    predicted = None
    if asked.prediction is not None:
        predicted = tuple(processor.encode_prediction(asked.prediction.text))
    one = PreparedPrompt(
        tuple(prompt_ids), params, top_logprobs, shown_ids(processor, style),
        prediction_ids=predicted,
    )  # fmt: skip
    without = dict.fromkeys(_MAKES_THE_PROMPT)
    fields = asked.model_copy(update=without)
    warnings += effort_warnings(processor, "reasoning_effort", asked.reasoning_effort)
    return Prepared(fields, model, (one,), grammar, style, end, warnings)


# Of no use to the reply, and long.
_MAKES_THE_PROMPT = (
    "messages", "tools", "chat_template_kwargs", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logit_bias", "stop",
    "metadata", "prediction",
)  # fmt: skip


def _tool_use(asked: ChatRequest) -> tuple[ToolUse, tuple[str, ...]]:
    """With warnings about tools that are left out."""
    tools, warnings = without_hosted(asked.tools or ())
    check_tools(tools)
    choice = openai_choice(asked.tool_choice)
    if choice.kind == "none":
        tools, warnings = {}, ()
    strict = frozenset(n for n, tool in tools.items() if tool["function"].get("strict"))
    several = asked.parallel_tool_calls is not False
    place = "tools[{}].function.parameters"
    return ToolUse([*tools.values()], [*tools], strict, choice, several, place), warnings
