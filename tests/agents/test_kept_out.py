"""When a worker says what keeps it out of rounds."""

from __future__ import annotations

from tensorlease.agents.kept_out import LASTS_S, KeptOut


def test_what_is_lacking_is_told_once_and_when_it_has_lasted() -> None:
    kept = KeptOut()
    kept.saw(["v: not offered"], 5.0)
    assert kept.due(5.0) == ()
    kept.saw(["v: not offered"], 5.0 + LASTS_S / 2)
    assert kept.due(5.0 + LASTS_S) == ("v: not offered",)
    assert kept.due(99.0) == ()


def test_what_the_next_offer_brings_is_not_told() -> None:
    kept = KeptOut()
    kept.saw(["v: not offered"], 5.0)
    kept.saw([], 5.5)
    assert kept.due(99.0) == ()


def test_another_set_is_told_again_as_is_the_same_after_it_was_whole() -> None:
    kept = KeptOut()
    for missing in (["v"], ["v", "w"], [], ["v"]):
        kept.saw(missing, 0.0)
        assert kept.due(LASTS_S) == tuple(missing)
