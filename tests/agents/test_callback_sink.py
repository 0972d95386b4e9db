"""How what comes is made into views, without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents.errors import MappingError, MismatchError
from tensorlease.agents.intake import Intake
from tensorlease.agents.mappings import process_mappings
from tensorlease.protocol.regions import OverlapError

from .test_intake import FAR, NEAR, Trainers, batch, plan

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.callback_sink import CallbackSink

torch = pytest.importorskip("torch")

Box = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Trainers]:
    monkeypatch.setenv("TENSORLEASE_SHM_DIR", str(tmp_path))
    made = Trainers()
    yield made
    for buffers in made.made:
        buffers.close()


@pytest.fixture
def intake() -> Iterator[Intake]:
    made = Intake("cpu:0")
    yield made
    made.unmap_all()
    assert process_mappings().held() == []


def sink(*args: object, **options: object) -> CallbackSink:
    from tensorlease.agents.callback_sink import CallbackSink

    return CallbackSink(lambda round, tensors: None, *args, **options)  # type: ignore[arg-type]


def give(
    intake: Intake,
    trainers: Trainers,
    trainer: str,
    *,
    registered: bool = False,
    regions: dict[str, Box] | None = None,
    **tensors: Tensor,
) -> dict[str, list[float]]:
    """Gives one batch; returns what the callback got, and sees that no view is left."""
    buffers = trainers.export(trainer, tensors, regions)
    handover = intake.copy(batch(trainer, buffers, registered=registered)).handover
    return taken(handover)


def taken(handover: object) -> dict[str, list[float]]:
    from tensorlease.agents.callback_sink import Handover

    assert isinstance(handover, Handover)
    got = {name: tensor.flatten().tolist() for name, tensor in handover.take()}
    assert handover.kept() == []
    return got


def test_pieces_of_several_batches_are_given_once_and_whole(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink())
    intake.begin()
    rows = torch.arange(6.0).view(3, 2)
    first: dict[str, Box] = {"w": ((3, 2), (0, 0))}
    second: dict[str, Box] = {"w": ((3, 2), (1, 0))}
    assert give(intake, trainers, NEAR, regions=first, w=rows[:1].clone()) == {}
    assert "w: 2 of 6 elements came" in intake.missing()
    # The same piece from another rank adds nothing.
    assert give(intake, trainers, FAR, regions=first, w=rows[:1].clone()) == {}
    assert "w: 2 of 6 elements came" in intake.missing()
    assert give(intake, trainers, FAR, regions=second, w=rows[1:].clone()) == {
        "w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    }
    assert intake.missing() == ""
    assert give(intake, trainers, NEAR, w=rows.clone()) == {}
    assert intake.missing() == ""


def test_pieces_that_overlap_without_being_equal_are_refused_by_name(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink())
    intake.begin()
    give(intake, trainers, NEAR, regions={"w": ((4,), (0,))}, w=torch.ones(2))
    with pytest.raises(OverlapError, match="'w'"):
        give(intake, trainers, FAR, regions={"w": ((4,), (1,))}, w=torch.ones(2))


@pytest.mark.parametrize("second", [torch.ones(3), torch.ones(2, dtype=torch.int32)])
def test_a_name_that_comes_as_two_different_tensors_is_refused(
    trainers: Trainers, intake: Intake, second: Tensor
) -> None:
    intake.give_to(sink())
    intake.begin()
    give(intake, trainers, NEAR, w=torch.ones(2))
    with pytest.raises(MismatchError, match="'w' is float32 of"):
        give(intake, trainers, FAR, w=second)


def test_registered_pieces_come_from_the_nearest_rank_that_holds_them(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink())
    far = trainers.export(FAR, {"w": torch.zeros(2), "only": torch.ones(1)})
    near = trainers.export(NEAR, {"w": torch.ones(2)})
    note, _ = plan(
        intake, trainers.offered(FAR, far, "cpu:1"), trainers.offered(NEAR, near, "cpu:0")
    )
    assert note.complete
    assert {taken.trainer: taken.buffers for taken in note.takes} == {
        NEAR: near.numbers,
        FAR: far.numbers,
    }
    intake.begin()
    assert "only: not sent in this round; w: not sent in this round" in intake.missing()
    handover = intake.copy(batch(FAR, far, registered=True)).handover
    assert taken(handover) == {"only": [1.0]}
    assert intake.missing() == "w: not sent in this round"
    handover = intake.copy(batch(NEAR, near, registered=True)).handover
    assert taken(handover) == {"w": [1.0, 1.0]}
    assert intake.missing() == ""


def test_registered_pieces_that_are_not_all_offered_are_named(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink(["w", "v"]))
    half = trainers.export(NEAR, {"w": torch.ones(2)}, {"w": ((4,), (0,))})
    note, _ = plan(intake, trainers.offered(NEAR, half))
    assert not note.complete
    assert note.missing == ["w: 2 of 4 elements offered", "v: not offered"]


def test_only_buffers_of_which_something_is_wanted_are_mapped(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink(["w"]))
    first = trainers.export(NEAR, {"w": torch.ones(2)})
    second = trainers.export(NEAR, {"other": torch.ones(2)})
    note, mapped = plan(intake, trainers.offered(NEAR, first), trainers.offered(NEAR, second))
    assert note.complete
    assert mapped == {NEAR: set(first.numbers)}
    assert intake.unwanted == ("other",)


def test_a_group_is_given_in_one_call_when_all_of_it_is_there(
    trainers: Trainers, intake: Intake
) -> None:
    intake.give_to(sink(together=[("w", "w_scale")]))
    intake.begin()
    assert give(intake, trainers, NEAR, w=torch.full((2,), 3.0), v=torch.ones(1)) == {"v": [1.0]}
    assert intake.missing() == "w_scale: not sent, and w must not come without it"
    given = give(intake, trainers, NEAR, w_scale=torch.ones(1))
    assert given == {"w_scale": [1.0], "w": [3.0, 3.0]}
    assert intake.missing() == ""
    intake.begin()
    given = give(intake, trainers, NEAR, w=torch.ones(1), w_scale=torch.ones(1))
    assert given == {"w": [1.0], "w_scale": [1.0]}


def test_a_buffer_that_is_smaller_than_its_table_is_never_looked_into(
    trainers: Trainers, intake: Intake
) -> None:
    from tensorlease.agents.callback_sink import Staged

    buffers = trainers.export(NEAR, {"w": torch.ones(2)}).buffers
    handle = trainers.export(NEAR, {"v": torch.ones(1)}).buffers[0].handle
    assert handle is not None
    memory = process_mappings().map(NEAR, 0, handle)
    entry = buffers[0].entries[0]
    with pytest.raises(MappingError, match="has 4 bytes, 'w' ends at byte 8"):
        Staged(sink(), frozenset()).take([(0, entry)], {0: memory})
    with pytest.raises(MappingError, match="not mapped"):
        Staged(sink(), frozenset()).take([(0, entry)], {})
    process_mappings().unmap(NEAR, 0)


def test_who_gets_what_is_not_attached_counts_both(trainers: Trainers, intake: Intake) -> None:
    from tensorlease.agents.sink import AttachedTensors

    mine = {"w": torch.zeros(2)}
    intake.attach(AttachedTensors(mine))
    intake.give_to(sink(["v"]))
    intake.begin()
    assert give(intake, trainers, NEAR, w=torch.ones(2), x=torch.ones(1)) == {}
    assert intake.missing() == "v: not sent in this round; sent and not wanted: x"
    assert intake.unwanted == ("x",)
    assert give(intake, trainers, NEAR, v=torch.ones(1)) == {"v": [1.0]}
    assert intake.missing() == ""
    assert mine["w"].tolist() == [1.0, 1.0]


def test_a_subset_needs_nothing_but_what_it_has_begun(trainers: Trainers, intake: Intake) -> None:
    intake.give_to(sink(["w", "v"]))
    intake.begin(subset=True)
    assert intake.missing() == "nothing of this subset is wanted here"
    assert give(intake, trainers, NEAR, regions={"w": ((4,), (0,))}, w=torch.ones(2)) == {}
    assert intake.missing() == "w: 2 of 4 elements came"
    give(intake, trainers, NEAR, regions={"w": ((4,), (2,))}, w=torch.ones(2))
    assert intake.missing() == ""
