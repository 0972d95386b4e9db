"""How offers are planned and batches copied, without a broker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents.account import MAX_MISSING
from tensorlease.agents.errors import MappingError, MismatchError
from tensorlease.agents.intake import Intake
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.work import CopyWork
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import OfferRef, Taken
from tensorlease.protocol.tables import BatchBody, OfferBody, encode_body

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlease.agents.pieces import Pieces
    from tensorlease.agents.source import RegisteredBuffers
    from tensorlease.protocol.records import TakeNote

torch = pytest.importorskip("torch")

NEAR, FAR, ME = "1" * 16, "2" * 16, "f" * 16
EPOCH = "e" * 16


class Trainers:
    """Exports tensors, and writes the messages that a worker would get."""

    def __init__(self) -> None:
        self.made: list[RegisteredBuffers] = []
        self._numbers = itertools.count()

    def export(
        self, trainer: str, tensors: dict[str, Tensor], regions: Pieces | None = None
    ) -> RegisteredBuffers:
        from tensorlease.agents.shm import ShmMemory
        from tensorlease.agents.source import register

        memory = ShmMemory(trainer)
        self.made.append(register(tensors, memory=memory, numbers=self._numbers, regions=regions))
        return self.made[-1]

    def offered(
        self, trainer: str, buffers: RegisteredBuffers, device: str = "cpu:0"
    ) -> tuple[m.Offered, bytes]:
        body = encode_body(OfferBody(buffers.buffers))
        number = self.made.index(buffers)
        return m.Offered(EPOCH, ME, trainer, 0, device, number, buffers.numbers), body


def batch(trainer: str, buffers: RegisteredBuffers, *, registered: bool) -> CopyWork:
    body = None if registered else encode_body(BatchBody(buffers.buffers))
    deliver = m.Deliver(
        EPOCH, ME, "g", 1, 0, 0, trainer, buffers.numbers, registered, buffers.nbytes
    )
    return CopyWork(("g", 1), deliver, body)


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


def attach(intake: Intake, tensors: dict[str, Tensor], *, strict: bool = True) -> None:
    from tensorlease.agents.sink import AttachedTensors

    intake.attach(AttachedTensors(tensors, strict=strict))


def plan(intake: Intake, *offers: tuple[m.Offered, bytes]) -> tuple[TakeNote, dict[str, set[int]]]:
    for message, body in offers:
        intake.offered(message, body)
    return intake.plan(intake.select([(o.trainer, o.number) for o, _ in offers]))


def test_what_is_offered_is_taken_from_the_nearest_and_only_that_is_mapped(
    trainers: Trainers, intake: Intake
) -> None:
    target = torch.zeros(3)
    attach(intake, {"w": target})
    far = trainers.export(FAR, {"w": torch.full((3,), 2.0)})
    near = trainers.export(NEAR, {"w": torch.full((3,), 1.0)})
    note, mapped = plan(
        intake, trainers.offered(FAR, far, "cpu:1"), trainers.offered(NEAR, near, "cpu:0")
    )
    assert note.complete
    assert note.takes == [Taken(NEAR, near.numbers)]
    assert note.seen == [OfferRef(FAR, 0), OfferRef(NEAR, 1)]
    assert mapped == {NEAR: set(near.numbers)}
    intake.begin()
    assert intake.missing() != ""
    intake.copy(batch(NEAR, near, registered=True))
    assert intake.missing() == ""
    assert target.tolist() == [1.0] * 3


def test_of_many_buffers_those_are_taken_and_mapped_that_hold_what_is_wanted(
    trainers: Trainers, intake: Intake
) -> None:
    experts = [trainers.export(NEAR, {f"experts.{n}": torch.full((3,), n)}) for n in range(8)]
    targets = {f"experts.{n}": torch.zeros(3, dtype=torch.int64) for n in (2, 5)}
    attach(intake, targets)
    note, mapped = plan(intake, *(trainers.offered(NEAR, buffers) for buffers in experts))
    wanted = [*experts[2].numbers, *experts[5].numbers]
    assert (note.complete, note.takes) == (True, [Taken(NEAR, wanted)])
    assert mapped == {NEAR: set(wanted)}
    assert process_mappings().held() == [(NEAR, number) for number in wanted]
    intake.begin()
    for buffers in experts:
        intake.copy(batch(NEAR, buffers, registered=True))
    assert intake.missing() == ""
    assert [target[0].item() for target in targets.values()] == [2, 5]
    assert len(process_mappings().held()) == 2


def test_a_segment_that_has_vanished_is_named_as_missing(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"w": torch.zeros(3)})
    buffers = trainers.export(NEAR, {"w": torch.ones(3)})
    offer = trainers.offered(NEAR, buffers)
    buffers.close()
    note, mapped = plan(intake, offer)
    assert not note.complete
    assert "segment gone" in note.missing[0]
    assert mapped == {}


def test_bytes_that_are_no_table_are_named_and_spoil_no_other_offer(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"w": torch.zeros(3)})
    buffers = trainers.export(NEAR, {"w": torch.ones(3)})
    message, body = trainers.offered(NEAR, buffers)
    note, mapped = plan(intake, (message, body), (m.Offered(EPOCH, ME, FAR, 1, "x", 9, [1]), b"?"))
    assert not note.complete
    assert "offer 9 of rank 1" in note.missing[0]
    assert note.takes == [Taken(NEAR, buffers.numbers)]
    assert NEAR in mapped


def test_a_table_of_other_buffers_than_its_envelope_is_refused(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"w": torch.zeros(3)})
    _, body = trainers.offered(NEAR, trainers.export(NEAR, {"w": torch.ones(3)}))
    note, _ = plan(intake, (m.Offered(EPOCH, ME, NEAR, 0, "cpu:0", 0, [5]), body))
    assert "other buffers" in note.missing[0]


def test_texts_of_what_is_missing_are_bounded(trainers: Trainers, intake: Intake) -> None:
    attach(intake, {f"w{n}": torch.zeros(1) for n in range(50)})
    buffers = trainers.export(NEAR, {"w0": torch.ones(1)})
    note, _ = plan(intake, trainers.offered(NEAR, buffers))
    assert not note.complete
    assert len(note.missing) == MAX_MISSING


def test_nothing_offered_is_never_complete(intake: Intake) -> None:
    attach(intake, {"w": torch.zeros(1)})
    note, mapped = intake.plan([])
    assert (note.complete, note.takes, mapped) == (False, [], {})


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch.zeros(3, dtype=torch.int32), "is int32 here and float32 at rank 0"),
        (torch.zeros(2), r"has the global shape (2,) here and (3,) at rank 0: make them equal"),
    ],
)
def test_what_does_not_fit_is_named_with_the_rank_that_offers_it(
    trainers: Trainers, intake: Intake, target: Tensor, text: str
) -> None:
    attach(intake, {"w": target})
    note, mapped = plan(intake, trainers.offered(NEAR, trainers.export(NEAR, {"w": torch.ones(3)})))
    assert (note.complete, note.takes, mapped) == (False, [], {})
    assert f"'w' {text}" in note.missing[0]


def test_a_name_that_is_not_offered_is_named_with_the_nearest_that_is(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"model.weight": torch.zeros(3)})
    note, _ = plan(intake, trainers.offered(NEAR, trainers.export(NEAR, {"weight": torch.ones(3)})))
    assert note.missing == [
        "model.weight: not offered; the nearest that is: 'weight' (rename= says which is meant)"
    ]


def test_where_no_trainer_is_no_name_is_said_to_be_missing(intake: Intake) -> None:
    attach(intake, {"model.weight": torch.zeros(3)})
    note, _ = plan(intake)
    assert (note.complete, note.missing) == (False, ["no trainer offers anything"])


def test_who_takes_what_comes_is_told_when_nothing_of_it_is_offered(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"w": torch.zeros(3)}, strict=False)
    note, _ = plan(intake, trainers.offered(NEAR, trainers.export(NEAR, {"v": torch.ones(3)})))
    assert not note.complete
    assert note.missing == ["of what this worker wants (w) nothing is offered; offered are: v"]


def test_who_wants_nothing_but_empty_tensors_is_complete_and_covered_once_they_are_offered(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"empty": torch.zeros(0, 3)})
    assert not intake.plan([])[0].complete
    tensors = {"w": torch.ones(3), "empty": torch.zeros(0, 3)}
    note, mapped = plan(intake, trainers.offered(NEAR, trainers.export(NEAR, tensors)))
    assert (note.complete, note.takes, mapped) == (True, [], {})
    assert intake.wants_nothing


def test_ring_batches_are_counted_by_regions_until_all_is_covered(
    trainers: Trainers, intake: Intake
) -> None:
    targets = {"a": torch.zeros(2), "b": torch.zeros(2)}
    attach(intake, targets)
    first = trainers.export(NEAR, {"a": torch.full((2,), 1.0)})
    second = trainers.export(NEAR, {"b": torch.full((2,), 2.0), "more": torch.ones(1)})
    intake.begin()
    intake.copy(batch(NEAR, first, registered=False))
    assert "b: 0 of 2" in intake.missing()
    intake.copy(batch(NEAR, second, registered=False))
    assert intake.missing() == ""
    assert {name: t.tolist() for name, t in targets.items()} == {"a": [1.0] * 2, "b": [2.0] * 2}
    intake.unmap(NEAR, [*first.numbers, *second.numbers])
    assert process_mappings().held() == []


def test_registered_and_ring_batches_of_one_round_count_together(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"a": torch.zeros(2), "b": torch.zeros(2)})
    registered = trainers.export(NEAR, {"a": torch.ones(2)})
    ring = trainers.export(NEAR, {"b": torch.ones(2)})
    plan(intake, trainers.offered(NEAR, registered))
    intake.begin()
    intake.copy(batch(NEAR, registered, registered=True))
    intake.copy(batch(NEAR, ring, registered=False))
    assert intake.missing() == ""


def test_a_batch_that_fits_nothing_or_was_never_planned_is_an_error(
    trainers: Trainers, intake: Intake
) -> None:
    attach(intake, {"w": torch.zeros(3)})
    buffers = trainers.export(NEAR, {"w": torch.ones(4)})
    intake.begin()
    with pytest.raises(MappingError, match="nothing is planned"):
        intake.copy(batch(NEAR, buffers, registered=True))
    with pytest.raises(MismatchError, match="'w'"):
        intake.copy(batch(NEAR, buffers, registered=False))


def test_unmapping_what_is_not_mapped_is_no_error(intake: Intake) -> None:
    intake.unmap(NEAR, [1, 2])
    assert process_mappings().held() == []
