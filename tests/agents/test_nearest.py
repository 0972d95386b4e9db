"""The nearest name to one that there is not."""

from __future__ import annotations

from tensorlease.agents.nearest import nearest


def test_the_most_similar_name_is_found_and_of_unlike_ones_none() -> None:
    known = (name for name in ("layers.0.weight", "layers.1.weight", "head.bias"))
    assert nearest("layer.1.weight", known) == "layers.1.weight"
    assert nearest("x", ["layers.0.weight"]) is None
    assert nearest("x", []) is None
