"""How a server wants to be asked, and how it counts tokens: found out by asking it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soloist.bench.client import Client, Prompt, Refused
from soloist.bench.stream import Answer, Counting, counting_of
from soloist.bench.text import python_characters
from soloist.errors import ServerFailed

# Long enough to see several chunks of a server that sends 16 tokens in each.
_PROBE_TOKENS = 64
# Fields that not every server takes, the least needed first.
_OPTIONAL = ("return_token_ids", "ignore_eos", "continuous_usage_stats", "include_usage")
_USAGE = ("continuous_usage_stats", "include_usage")


@dataclass(frozen=True, slots=True)
class Server:
    """A server and how to ask it.

    Attributes:
        client: the connection.
        model: as the server calls it.
        fields: beyond OpenAI's, that it takes.
        counting: how tokens of its answers are counted.
    """

    client: Client
    model: str
    fields: frozenset[str]
    counting: Counting

    def ask(self, prompt: Prompt, max_tokens: int) -> Answer:
        """One greedy answer.

        Raises:
            Refused, ServerFailed: it cannot be had.
        """
        return self.client.ask(prompt, max_tokens, self.model, _body(self.fields))


def meet(client: Client) -> Server:
    """Find out which fields a server takes and how it counts; this warms it up as well.

    Raises:
        ServerFailed: it answers none of the requests.
    """
    model = client.target.model or client.only_model()
    prompt = python_characters(400)
    fields = frozenset(_OPTIONAL[1:])
    answer, fields = _accepted(client, model, prompt, fields)
    counting = counting_of(answer)
    if counting is not Counting.CONTINUOUS_USAGE:
        answer, with_ids = _accepted(client, model, prompt, fields | {"return_token_ids"})
        if counting_of(answer) is Counting.TOKEN_IDS:
            fields, counting = with_ids, Counting.TOKEN_IDS
    return Server(client, model, fields, counting)


def _accepted(
    client: Client, model: str, prompt: str, fields: frozenset[str]
) -> tuple[Answer, frozenset[str]]:
    """An answer, and those of the optional fields that the server took."""
    while True:
        try:
            return client.ask(prompt, _PROBE_TOKENS, model, _body(fields)), fields
        except Refused as refused:
            if not fields:
                raise ServerFailed(client.url, str(refused)) from refused
            fields -= _to_leave_out(fields, refused.told)


def _to_leave_out(fields: frozenset[str], told: str) -> frozenset[str]:
    """Fields that an error names; where it names all or none, the least needed one."""
    named = frozenset(field for field in fields if field in told)
    if named and named != fields:
        return named
    return frozenset([next(field for field in _OPTIONAL if field in fields)])


def _body(fields: frozenset[str]) -> Mapping[str, Any]:
    body: dict[str, Any] = {field: True for field in fields if field not in _USAGE}
    usage = {field: True for field in _USAGE if field in fields}
    return {**body, "stream_options": usage} if usage else body
