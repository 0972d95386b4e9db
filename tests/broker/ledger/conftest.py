"""A desk for each example; what the ledger keeps is validated once more when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .harness import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.ledger.validate()
