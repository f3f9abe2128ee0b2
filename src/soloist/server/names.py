"""Which names the model answers to."""

from collections.abc import Sequence

from soloist.server.problems import Problem


def served_name(names: Sequence[str], asked: str | None) -> str:
    """The name to reply with.

    Raises:
        Problem: 404 for a name that is not served.
    """
    if asked is None:
        return names[0]
    if asked not in names:
        raise Problem(
            404,
            f"the model '{asked}' does not exist here (available: {', '.join(names)})",
            param="model",
            code="model_not_found",
        )
    return asked
