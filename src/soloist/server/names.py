"""Which names the model answers to."""

from soloist.server.config import ServerConfig
from soloist.server.problems import Problem


def served_name(config: ServerConfig, asked: str | None) -> str:
    """The name to reply with.

    Raises:
        Problem: 404 for a name that is not served.
    """
    if asked is None:
        return config.names[0]
    if asked not in config.names:
        raise Problem(
            404,
            f"the model '{asked}' does not exist here (there is: {', '.join(config.names)})",
            param="model",
            code="model_not_found",
        )
    return asked
