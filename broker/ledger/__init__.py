"""The ledger: who holds what, until when. A pure state machine."""

from .core import Ledger
from .state import NOBODY, Settings

__all__ = ["NOBODY", "Ledger", "Settings"]
