"""What a message says of a name that there is not: the nearest one that there is."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name among these that is most like this one; None: none is like it.

    It compares with each of them, which takes milliseconds for some thousand.
    """
    from difflib import get_close_matches  # Here, since a process without mistakes needs it never.

    found = get_close_matches(name, list(known), 1)
    return found[0] if found else None
