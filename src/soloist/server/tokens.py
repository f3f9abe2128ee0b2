"""POST /tokenize and /detokenize: what a prompt is to the model."""

from starlette.requests import Request
from starlette.responses import Response

from soloist.engine import Engine
from soloist.errors import BadTokenId
from soloist.server.bodies import read
from soloist.server.fields import ChatFields, DetokenizeRequest, TokenizeRequest
from soloist.server.names import served_name
from soloist.server.problems import invalid
from soloist.server.prompts import chat_prompt, elsewhere
from soloist.server.replies import json_reply


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    host = request.app.state.host
    asked = await read(request, TokenizeRequest, host.config.most_body_bytes)
    served_name(host.config, asked.model)
    engine = host.ready().engine
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    for name in ChatFields.model_fields:
        if asked.prompt is not None and getattr(asked, name) is not None:
            raise invalid(name, "only beside messages")
    ids = await elsewhere(asked.prompt or asked.messages, lambda: _ids(engine, asked))
    return json_reply(
        {"tokens": ids, "count": len(ids), "max_model_len": engine.resolved.context_tokens}
    )


def _ids(engine: Engine, asked: TokenizeRequest) -> list[int]:
    specials = asked.add_special_tokens
    if asked.messages is None:
        return engine.tokenizer.encode(
            asked.prompt or "", add_special_tokens=True if specials is None else specials
        )
    text = chat_prompt(engine, asked, asked.tools or None)
    return engine.tokenizer.encode(text, add_special_tokens=bool(specials))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    host = request.app.state.host
    asked = await read(request, DetokenizeRequest, host.config.most_body_bytes)
    served_name(host.config, asked.model)
    engine = host.ready().engine
    vocab = engine.config.vocab_size
    for token_id in asked.tokens:
        if not 0 <= token_id < vocab:
            raise BadTokenId("tokens", token_id, vocab)
    text = await elsewhere(
        asked.tokens,
        lambda: engine.tokenizer.decode(
            asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens)
        ),
    )
    return json_reply({"prompt": text})
