"""An answer that a live connection lost: it is said again, a bounded number of times."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import pytest

from tensorlease.agents import TrainerAgent, WorkerAgent
from tensorlease.agents.dealer import Dealer
from tensorlease.agents.repeats import EVERY_BEATS, MAX_ANSWERS, TIMES, Repeats
from tensorlease.agents.work import CopyWork, PrepareWork
from tensorlease.agents.worker_core import WorkerCore
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import decode_from_agent

from ..procs import Spawned
from .cores import GROUP, posts
from .worker_rounds import commit, deliver, make, prepare, staging, take, voted

torch = pytest.importorskip("torch")


def beaten(core: WorkerCore, times: int) -> list[m.FromAgent]:
    """What it says at so many beats, beside the beats."""
    said: list[m.FromAgent] = []
    for _ in range(times):
        core.beat()
        said += [message for message in posts(core) if not isinstance(message, m.Beat)]
    return said


VOTE = [m.Staged(1, GROUP, 1, 0, 0, False), m.Vote(1, GROUP, 1)]


def test_a_vote_that_nothing_follows_is_said_again_and_then_no_more() -> None:
    core = voted()
    assert beaten(core, EVERY_BEATS) == []
    assert beaten(core, 1) == VOTE
    assert beaten(core, 100) == VOTE * (TIMES - 1)


def test_a_batch_that_was_taken_in_is_said_again_while_the_next_does_not_come() -> None:
    core = staging()
    deliver(core)
    assert beaten(core, 10) == []  # It has something to do.
    take(core, CopyWork)
    assert beaten(core, 10) == []  # It is doing it.
    core.copied(True)
    posts(core)
    assert beaten(core, EVERY_BEATS + 1) == VOTE[:1]
    deliver(core, 1)
    take(core, CopyWork)
    core.copied(True)
    posts(core)
    again = [m.Staged(1, GROUP, 1, 0, seq, False) for seq in (0, 1)]
    assert beaten(core, EVERY_BEATS + 1) == again


def test_of_many_batches_the_last_are_said_again() -> None:
    core = staging()
    for seq in range(MAX_ANSWERS + 5):
        deliver(core, seq)
        take(core, CopyWork)
        core.copied(True)
    posts(core)
    said = beaten(core, EVERY_BEATS + 1)
    assert [message.seq for message in said if isinstance(message, m.Staged)] == list(
        range(5, MAX_ANSWERS + 5)
    )


def test_nothing_is_said_again_before_a_batch_came_after_the_decision_or_without_a_session() -> (
    None
):
    assert beaten(staging(), 50) == []
    core = voted()
    commit(core)
    assert beaten(core, 50) == []
    core = voted()
    core.disconnected()
    assert beaten(core, 50) == []


def test_news_begin_the_count_anew() -> None:
    repeats = Repeats()
    assert not any(repeats.due("here") for _ in range(EVERY_BEATS))
    assert not any(repeats.due("there") for _ in range(EVERY_BEATS))
    assert repeats.due("there")
    assert not any(repeats.due(None) for _ in range(50))


def test_a_lost_acknowledgement_is_healed_and_counts_once(
    start_broker: Callable[..., Spawned], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version, the first acknowledgement of the worker vanishes on its way to the broker."""
    lost: list[m.Staged] = []
    loses = threading.Event()
    send = Dealer.send

    def lossy(self: Dealer, messages: deque[list[bytes]]) -> None:
        for frames in list(messages):
            message = decode_from_agent(frames[0])
            if isinstance(message, m.Staged) and loses.is_set():
                loses.clear()
                lost.append(message)
                messages.remove(frames)
        send(self, messages)

    monkeypatch.setattr(Dealer, "send", lossy)
    start_broker(beat=0.05, silent=2.0)
    weights, copy = torch.zeros(3), torch.zeros(3)
    with (
        TrainerAgent("policy", endpoint=url) as trainer,
        WorkerAgent("policy", endpoint=url, replica="a") as worker,
    ):
        trainer.register({"w": weights})
        worker.attach({"w": copy})
        thread = threading.Thread(target=worker.run)
        thread.start()
        trainer.wait_ready()  # A batch that comes before the admission does not tell the total.
        for version in range(1, 6):
            loses.set()
            weights.fill_(version)
            result = trainer.publish(version, timeout=20.0).raise_for_status()
            assert (result.receivers["a/0"].batches, copy.tolist()) == (1, [version] * 3)
        assert [message.vote for message in lost] == [True] * 5
        assert worker._core.session.number == 1
        worker.stop()
        thread.join(10.0)


def test_a_first_copy_that_takes_long_is_told_from_a_prepare_hook_that_does() -> None:
    core = make()
    prepare(core)
    deliver(core)
    take(core, PrepareWork)
    core.beat()
    core.prepared(True)
    take(core, CopyWork)
    assert not any(isinstance(message, m.Ready) for message in posts(core))
    core.beat()
    core.beat()
    said = [message for message in posts(core) if not isinstance(message, m.Beat)]
    assert said == [m.Ready(1, GROUP, 1)]
    core.copied(True)
    core.beat()
    assert not any(isinstance(message, m.Ready) for message in posts(core))
