"""Amounts for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def per_second(amount: float) -> str:
    """How often something happens: `3.2/s`, `340/s`."""
    return f"{amount:.1f}/s" if amount < 10 else f"{amount:.0f}/s"
