"""What a worker says of a version that it waits for."""

from __future__ import annotations

import pytest

from tensorlease.agents import DeadlineError, TrainerAgent, WorkerAgent
from tensorlease.agents.worker_state import CurrentRound, OfferNote, WorkerState, why_late
from tensorlease.protocol.records import TakeNote, Terms

from .serving import weights, work_until
from .stages import Views

torch = pytest.importorskip("torch")


def raising(*_: object) -> None:
    raise ValueError("no room")


def test_who_never_heard_of_a_trainer_is_asked_for_the_channels_name(worker: WorkerAgent) -> None:
    text = why_late(WorkerState(), "polcy")
    assert "no trainer has offered anything" in text and "is 'polcy' the trainers' channel" in text
    known = WorkerState(offers=[OfferNote("t", 0, [1])])
    assert "no trainer has opened a round for it" in why_late(known, "policy")
    assert "the trainers' channel" not in why_late(known, "policy")


def test_what_it_lacks_now_is_said_before_how_it_left_an_earlier_round() -> None:
    state = WorkerState(note=TakeNote([], [], False, ["v: not offered"]))
    state.note_left(CurrentRound(("g", 1), Terms(1, 1, False), []), "broken")
    assert why_late(state, "policy") == ", and cannot be in a round: v: not offered"
    state.note = TakeNote([], [], True, [])
    assert why_late(state, "policy") == ", and left version 1: broken"


@pytest.mark.parametrize("name", ["on_prepare", "on_commit", "on_stage"])
def test_a_worker_whose_hook_raised_says_so_until_it_commits(
    trainer: TrainerAgent, worker: WorkerAgent, name: str
) -> None:
    fail = True

    def hook(*_: object) -> None:
        if fail:
            raise ValueError("no room")

    if name != "on_stage":
        worker.attach(weights())
    getattr(worker, name)(hook)
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    text = f"and left version 1: {name} raised ValueError: no room"
    with pytest.raises(DeadlineError, match=text):
        worker.wait_for(1, 0.05)
    fail = False
    handle = trainer.publish_nowait(2)
    assert worker.wait_for(2, 10.0) == 2
    with pytest.raises(DeadlineError) as late:
        worker.wait_for(3, 0.05)
    assert "left version" not in str(late.value)


def test_a_worker_that_keeps_views_is_told_to_drop_them(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    kept: list[Views] = []

    def load(round: object, tensors: Views) -> None:
        kept.append(tensors)

    worker.on_stage(load)
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    with pytest.raises(DeadlineError, match="left version 1: .*views .* of version 1 are kept"):
        worker.wait_for(1, 0.05)
    kept.clear()
    work_until(worker, lambda: not worker.holding)
    with pytest.raises(DeadlineError) as late:
        worker.wait_for(1, 0.05)
    assert "are kept still" not in str(late.value)


def test_a_round_that_was_aborted_is_how_it_was_left(
    trainer: TrainerAgent, worker: WorkerAgent
) -> None:
    worker.attach(weights())
    worker.on_prepare(lambda _: trainer.void(1) and None)
    handle = trainer.publish_nowait(1)
    work_until(worker, lambda: handle.finished.done)
    with pytest.raises(DeadlineError, match="and left version 1: .*void"):
        worker.wait_for(1, 0.05)
