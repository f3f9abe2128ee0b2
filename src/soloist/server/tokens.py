"""POST /tokenize and /detokenize: what a prompt is to the model."""

from starlette.requests import Request
from starlette.responses import Response

from soloist.server.bodies import whole_reply
from soloist.server.preparation.jobs import DETOKENIZE, TOKENIZE


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    return await whole_reply(request, TOKENIZE)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    return await whole_reply(request, DETOKENIZE)
