"""What a prompt is to the model: replies that are whole as soon as the request is read."""

import orjson

from soloist.errors import BadTokenId
from soloist.server.fields import ChatFields, DetokenizeRequest, TokenizeRequest
from soloist.server.hosted import without_hosted
from soloist.server.preparation.prepared import with_warnings
from soloist.server.problems import invalid
from soloist.server.prompts import chat_prompt
from soloist.text.processor import Processor


def tokenize(processor: Processor, asked: TokenizeRequest, _: str) -> bytes:
    """The reply to POST /tokenize.

    Raises:
        Problem, UserError: neither a prompt nor messages, or both; a text that cannot fit.
    """
    if asked.content is not None:
        return _of_content(processor, asked, asked.content)
    for name in ("add_special", "with_pieces"):
        if getattr(asked, name) is not None:
            raise invalid(name, "only with content")
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    for name in ChatFields.model_fields:
        if asked.prompt is not None and getattr(asked, name) is not None:
            raise invalid(name, "only with messages")
    specials = asked.add_special_tokens
    tools, warnings = without_hosted(asked.tools or ())
    if asked.messages is None:
        text, specials = asked.prompt or "", True if specials is None else specials
    else:
        variables = asked.chat_template_kwargs or {}
        text = chat_prompt(processor, asked, [*tools.values()] or None, variables)
    ids = processor.encode(text, add_special_tokens=bool(specials))
    told = {"tokens": ids, "count": len(ids), "max_model_len": processor.context_tokens}
    return orjson.dumps(with_warnings(told, warnings))


def _of_content(processor: Processor, asked: TokenizeRequest, content: str) -> bytes:
    """The reply as llama.cpp's clients read it.

    Raises:
        Problem, UserError: a field of the other kind; a text that cannot fit.
    """
    for name in ("prompt", "add_special_tokens", *ChatFields.model_fields):
        if getattr(asked, name) is not None:
            raise invalid(name, "only without content")
    ids = processor.encode(content, add_special_tokens=bool(asked.add_special))
    if not asked.with_pieces:
        return orjson.dumps({"tokens": ids})
    return orjson.dumps({"tokens": [{"id": i, "piece": _piece(processor, i)} for i in ids]})


def _piece(processor: Processor, token_id: int) -> str | list[int]:
    """The text of a token; its bytes where they are no whole characters."""
    spelled = processor.tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def detokenize(processor: Processor, asked: DetokenizeRequest, _: str) -> bytes:
    """The reply to POST /detokenize.

    Raises:
        BadTokenId: the vocabulary has no such token.
    """
    for token_id in asked.tokens:
        if not 0 <= token_id < processor.vocab_size:
            raise BadTokenId("tokens", token_id, processor.vocab_size)
    skip = bool(asked.skip_special_tokens)
    text = processor.tokenizer.decode(asked.tokens, skip_special_tokens=skip)
    # Under both names: vLLM's and llama.cpp's clients ask with the same fields.
    return orjson.dumps({"prompt": text, "content": text})
