"""Values for fields of random requests, right and wrong ones; no module of the server is needed."""

import random

MESSAGES = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "A function that adds two numbers"},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
PART = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}

# Values of a field that may well be right.
LIKELY = {
    "messages": [MESSAGES, MESSAGES[1:], [{"role": "user", "content": [PART]}]],
    "prompt": ["def", "", ["a", "b"], [1, 2], [[1], [2, 3]]],
    "input": ["x", [{"role": "user", "content": "x"}], [{"type": "reasoning", "content": "x"}]],
    "tokens": [[], [1, 2, 3], [9999]], "model": ["gpt", "etude-draft", "no"],
    "max_tokens": [1, 5, 30], "max_completion_tokens": [1, 5], "max_output_tokens": [1, 5],
    "temperature": [0, 0.7, 1, 2], "top_p": [0.5, 1], "top_k": [-1, 0, 5], "min_p": [0, 0.1],
    "n": [1, 2, 3], "stream": [True, False], "stream_options": [{"include_usage": True}],
    "stop": ["x", ["return", "\n"], []], "stop_sequences": [["return"]], "seed": [0, 2**64 - 1],
    "logit_bias": [{"5": 3}, {"11": -100}, {"x": 1}], "logprobs": [True, False, 3],
    "top_logprobs": [0, 3], "return_token_ids": [True], "echo": [True], "suffix": ["x"],
    "ignore_eos": [True, False], "min_tokens": [0, 2], "presence_penalty": [0.5],
    "frequency_penalty": [-0.5], "repetition_penalty": [1.2], "stop_token_ids": [[5]],
    "system": ["x", [{"type": "text", "text": "x"}]], "tool_choice": ["auto", "none", "required"],
    "tools": [[], [TOOL], [TOOL | TOOL["function"]], [{"name": "f", "input_schema": {}}]],
    "thinking": [{"type": "adaptive"}, {"type": "disabled"}], "metadata": [{"a": "b"}],
    "response_format": [{"type": "json_object"}, {"type": "text"}, SCHEMA, {"type": "x"}],
    "text": [{"format": {"type": "json_object"}}, {"format": SCHEMA | SCHEMA["json_schema"]}],
    "output_config": [{"effort": "high"}, {"format": {"type": "json_schema", "schema": {}}}],
    "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["a", "b"]}, {"regex": "["}],
    "guided_regex": ["a|b"], "guided_choice": [["x"]], "guided_grammar": ["start: \"a\""],
    "guided_json": [{"type": "integer"}, {"type": "no"}], "context_management": [{"edits": []}],
    "include": [["reasoning.encrypted_content"]], "reasoning": [{"summary": "auto"}],
    "instructions": ["x"], "chat_template_kwargs": [{"think": True}, {"messages": 1}],
}  # fmt: skip
WORDS = ["type", "text", "role", "user", "content", "function", "name", "arguments", "id", ""]
KINDS = [
    "text", "input_text", "output_text", "function", "function_call", "function_call_output",
    "tool_use", "tool_result", "thinking", "reasoning", "message", "image",
]  # fmt: skip


def junk(rng: random.Random, depth: int = 3) -> object:
    """Any JSON value, often of words that requests are made of."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        made = {rng.choice(WORDS): junk(rng, depth - 1) for _ in range(rng.randrange(4))}
        return made | ({"type": rng.choice(KINDS)} if rng.random() < 0.5 else {})
    return [
        None, rng.random() < 0.5, rng.randrange(-5, 40), rng.choice([2**65, -(2**63), 10**9]),
        rng.choice([0.5, -1e300, 1e-9]), rng.choice(WORDS + KINDS),
        rng.choice(["é🦀", "\0", "x" * 9]),
    ][kind]  # fmt: skip
