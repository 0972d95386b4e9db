"""Fixtures of end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .parties import World, making_world


@pytest.fixture
def world() -> Iterator[World]:
    """A place for processes, which are ended with the test."""
    with making_world() as made:
        yield made
