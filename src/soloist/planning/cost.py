"""What tokens cost: time of a machine that is paid by the hour, or prices of an API. Pure.

    cost of a machine's time = seconds × price an hour / 3600 / utilisation

    cost by an API = (prompt - cached) × input price + cached × cached price + new × output price

Utilisation is the share of the paid hours in which the machine answers requests; what it costs
while it waits is spread over what it does.
"""

from dataclasses import dataclass

from soloist.errors import SettingError

_MILLION = 1e6
_SECONDS_AN_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that is paid by the hour.

    Attributes:
        price_per_hour: of all its GPUs together, in any currency.
        utilisation: share of the paid hours in which it answers, above 0 to 1.
    """

    price_per_hour: float
    utilisation: float

    def cost(self, seconds: float) -> float:
        """Of so much work."""
        return seconds * self.price_per_hour / _SECONDS_AN_HOUR / self.utilisation


@dataclass(frozen=True, slots=True)
class ApiPrices:
    """What an API charges for a million tokens, in any currency."""

    prompt: float
    cached: float
    new: float

    def cost(self, prompt_tokens: float, cached_tokens: float, new_tokens: float) -> float:
        """Of a request; cached tokens are those of the prompt that are charged as such."""
        read = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached
        return (read + new_tokens * self.new) / _MILLION


def read_machine(price_per_hour: float, utilisation: float) -> Machine:
    """A machine as people give it.

    Raises:
        SettingError: a price below 0, or a utilisation that is no share.
    """
    if price_per_hour < 0:
        raise SettingError("--price", price_per_hour, "at least 0, an hour")
    if not 0 < utilisation <= 1:
        raise SettingError("--utilisation", utilisation, "above 0 and at most 1, such as 0.5")
    return Machine(price_per_hour, utilisation)


def read_api_prices(given: str) -> ApiPrices:
    """Prices of a million tokens, written PROMPT/NEW or PROMPT/CACHED/NEW, such as 0.6/2.4.

    Raises:
        SettingError: it is not written so.
    """
    allowed = "PROMPT/NEW or PROMPT/CACHED/NEW for a million tokens, such as 0.6/2.4"
    try:
        prices = [float(word) for word in given.split("/")]
    except ValueError:
        raise SettingError("--api-price", given, allowed) from None
    if len(prices) not in (2, 3) or not all(0 <= price < float("inf") for price in prices):
        raise SettingError("--api-price", given, allowed)
    return ApiPrices(prices[0], prices[-2], prices[-1])


@dataclass(frozen=True, slots=True)
class Work:
    """An interactive step: a prompt to read, all but what is cached, and an answer."""

    prompt_tokens: int
    new_tokens: int


def read_work(given: str) -> Work:
    """Tokens of a step, written PROMPT/NEW, such as 2000/200.

    Raises:
        SettingError: it is not written so.
    """
    words = given.split("/")
    if len(words) != 2 or not all(word.isascii() and word.isdecimal() for word in words):
        raise SettingError("--step", given, "PROMPT/NEW in tokens, such as 2000/200")
    prompt, new = map(int, words)
    if prompt < 1 or new < 1:
        raise SettingError("--step", given, "at least one token of each")
    return Work(prompt, new)
