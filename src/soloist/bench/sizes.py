"""Sizes that people give a measurement."""

from soloist.errors import SettingError


def require_at_least(*sizes: tuple[str, int, int]) -> None:
    """Refuse sizes that are too small.

    Args:
        sizes: (option, what was given, the least).

    Raises SettingError.
    """
    for option, given, least in sizes:
        if given < least:
            raise SettingError(option, given, f"at least {least}")
