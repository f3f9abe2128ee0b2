"""In which order a file puts the columns of a matrix into groups. Pure."""

from typing import Any

from soloist.model.quantized import MOST_COLUMNS

# Of a matrix whose groups are consecutive columns.
CONSECUTIVE = b""


def column_order(groups: Any, group: int) -> bytes | None:  # noqa: ANN401 - numpy is not imported
    """What is equal for equal orders; None for one in which codes cannot be kept.

    Sorted by group, and within a group as they were, columns have groups as wide as the format
    says, all of them; a table with 16 bits for a column says where each came from.

    Args:
        groups: of each column, numpy integers [K].
        group: columns of a group, which divide K.
    """
    by_group = groups[groups.argsort(kind="stable")].reshape(-1, group)
    has_all = by_group[:, 0].tolist() == list(range(len(by_group)))
    if not has_all or (by_group != by_group[:, :1]).any():
        return None
    if (groups.reshape(-1, group) == by_group).all():
        return CONSECUTIVE
    return None if len(groups) > MOST_COLUMNS else bytes(groups.tobytes())
