"""One name twice in what a round carries: refused where it is the same elements, right elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorlease.agents import ExportError, Outcome, TrainerAgent

from ..broker.raw_agents import Threaded
from .conftest import StartWorker
from .rings import RING

torch = pytest.importorskip("torch")

TOP = {"w": ((4, 2), (0, 0))}
BOTTOM = {"w": ((4, 2), (2, 0))}


@pytest.fixture
def pieces(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    """A trainer that has registered the upper half of `w`."""
    agent = TrainerAgent("policy", endpoint=url, distribution="assembled", ring=RING)
    agent.register({"w": torch.full((2, 2), 1.0)}, regions=TOP)
    yield agent
    agent.close(timeout=0.5)


def test_a_name_that_is_registered_is_refused_with_the_ways_out_and_nothing_is_lost(
    trainer: TrainerAgent, start_worker: StartWorker
) -> None:
    target = torch.zeros(3)
    other = torch.full((3,), 7.0)
    address = other.data_ptr()
    for again in ({"w": other}, {"new": torch.ones(1), "w": other}):
        with pytest.raises(
            ExportError, match=r"'w' is registered already.*unregister\(\)"
        ) as caught:
            trainer.register(again)
        assert caught.value.tensor == "w"
    with pytest.raises(ExportError, match="'w' is registered already"):
        trainer.register({"w": other}, shadow=True)
    assert other.data_ptr() == address
    start_worker("a", {"w": target})
    assert trainer.publish(1, timeout=20.0).ok
    assert target.tolist() == [1.0] * 3


def test_an_empty_tensor_is_refused_a_second_time_too(trainer: TrainerAgent) -> None:
    trainer.register({"none": torch.zeros(0, 4)})
    with pytest.raises(ExportError, match="'none' is registered already"):
        trainer.register({"none": torch.zeros(0, 4)})


def test_other_pieces_of_a_name_are_registered_by_a_call_of_their_own(
    pieces: TrainerAgent, start_worker: StartWorker
) -> None:
    target = torch.zeros(4, 2)
    pieces.register({"w": torch.full((2, 2), 2.0)}, regions=BOTTOM)
    start_worker("a", {"w": target})
    assert pieces.publish(1, timeout=20.0).ok
    assert target[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (((4, 2), (1, 0)), "registered already"),
        (((4, 2), (0, 0)), "registered already"),
        (((5, 2), (3, 0)), "a piece of another global shape"),
        (((4, 2, 1), (2, 0, 0)), "a piece of another global shape"),
    ],
)
def test_pieces_that_overlap_or_are_of_another_shape_are_refused(
    pieces: TrainerAgent, region: tuple[tuple[int, ...], tuple[int, ...]], text: str
) -> None:
    piece = torch.zeros((2, 2, 1)[: len(region[0])])
    with pytest.raises(ExportError, match=f"'w' is {text}|'w' is registered already as {text}"):
        pieces.register({"w": piece}, regions={"w": region})


@pytest.mark.parametrize("how", ["unregister", "close"])
def test_what_was_taken_back_or_closed_may_be_registered_again(
    broker: Threaded, url: str, how: str
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        former = trainer.register({"w": torch.ones(3)})
        if how == "unregister":
            trainer.unregister(former, timeout=10.0)
        else:
            former.close()
        again = trainer.register({"w": torch.ones(3)})
        assert again.names == ("w",)
        assert not again.closed


def test_two_ranks_may_register_the_same_name(broker: Threaded, url: str) -> None:
    with (
        TrainerAgent("policy", endpoint=url, rank=0, world_size=2) as first,
        TrainerAgent("policy", endpoint=url, rank=1, world_size=2, device="cpu:1") as second,
    ):
        first.register({"w": torch.ones(3)})
        assert second.register({"w": torch.ones(3)}).names == ("w",)


def test_a_registered_name_cannot_be_sent_too_but_in_a_subset_round(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    target = {"w": torch.zeros(3), "v": torch.zeros(3)}
    with TrainerAgent("policy", endpoint=url, ring=RING) as trainer:
        trainer.register({"w": torch.ones(3)})
        start_worker("a", target, strict=False)
        with trainer.open_round(1, timeout=20.0) as r:
            with pytest.raises(ExportError, match="'w' is registered with this trainer") as caught:
                r.send("w", torch.zeros(3))
            with pytest.raises(ExportError, match="'w' is registered with this trainer"):
                r.send("v", torch.zeros(3), tied=["w"])
            r.send("v", torch.full((3,), 2.0))
            with pytest.raises(ExportError, match="'w' is registered with this trainer"):
                r.send("w", torch.zeros(3))
        assert "subset=" in str(caught.value)
        assert r.result is not None
        assert r.result.ok
        with trainer.open_round(2, timeout=20.0, subset=["w"], base=1) as r:
            r.send("w", torch.full((3,), 5.0))
        assert r.result is not None
        assert r.result.ok
        assert (target["w"][0].item(), target["v"][0].item()) == (5.0, 2.0)


def test_pieces_of_one_name_may_be_registered_and_sent(pieces: TrainerAgent) -> None:
    with pieces.open_round(1, timeout=20.0, min_replicas=0) as r:
        with pytest.raises(ExportError, match="'w' is registered with this trainer"):
            r.send("w", torch.zeros(2, 2), region=((4, 2), (1, 0)))
        r.send("w", torch.full((2, 2), 3.0), region=((4, 2), (2, 0)))
    assert r.result is not None
    assert r.result.outcome is Outcome.EMPTY
