"""What a broker keeps of peers that ask without end, come and go, or publish to nobody.

TENSORLEASE_TEST_FLOOD multiplies how much comes: by 50 it is 200,000 questions, 20,000 connections and 4,000
rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tensorlease.broker.config import Limits
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import encode
from tensorlease.protocol.records import Outcome, QueryKind, Terms

from .raw_agents import (
    Child,
    Raw,
    Spawn,
    Threaded,
    broker_process,
    config_for,
    eventually,
    new_instance,
    trainer_hello,
    worker_hello,
)

TIMES = float(os.environ.get("TENSORLEASE_TEST_FLOOD", "1"))
QUESTIONS = round(4_000 * TIMES)
CONNECTIONS = round(400 * TIMES)
ROUNDS = round(80 * TIMES)
MAX_AGENTS = 64
MOST = 200 * 2**20
"""Bytes that a broker may take more than at its start; here some 20 MiB are seen."""


def resident(child: Child) -> int:
    """Bytes of its resident memory."""
    fields = Path(f"/proc/{child.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(child: Child) -> int:
    return len(os.listdir(f"/proc/{child.pid}/fd"))


def test_the_broker_of_an_agent_that_asks_without_end_and_never_reads_stays_small(
    url: str, spawn: Spawn, context: zmq.Context[zmq.Socket[bytes]], raw: Callable[[], Raw]
) -> None:
    broker = broker_process(spawn, url, "--limits-max-queue-messages", "256")
    asked = raw()
    asked.status()
    before = resident(broker)
    flooding = Raw(context, url, hwm=1)
    flooding.socket.setsockopt(zmq.SNDTIMEO, 10_000)
    flooding.join(worker_hello())
    question = encode(m.Query(1, QueryKind.STATUS))
    for _ in range(QUESTIONS):
        flooding.socket.send(question)
    # It has read them all, and another is answered.
    eventually(lambda: asked.status().counters.messages_received >= QUESTIONS)
    counters = asked.status().counters
    # The session of who does not read is dropped, with all that was unsent; then answers fall away.
    assert (counters.lost_sessions, counters.unsent_messages) == (1, 0)
    assert resident(broker) - before < MOST


def test_a_broker_of_agents_that_come_and_go_without_end_stays_small(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    broker = broker_process(spawn, url, "--limits-max-agents", str(MAX_AGENTS))
    asked = raw()
    asked.status()
    before = resident(broker)
    for first in range(0, CONNECTIONS, 100):
        # Its end waits until they are closed: this process must not run out of descriptors.
        with zmq.Context() as context:
            for number in range(first, first + 100):
                with context.socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 5_000)
                    socket.connect(url)
                    socket.send(encode(worker_hello(f"r{number}", instance=new_instance())))
                    socket.send(encode(m.Beat(1)))
    eventually(lambda: asked.status().counters.messages_received >= 2 * CONNECTIONS)
    status = asked.status()
    # Their process lives, and they never said goodbye: they keep their places, and no more.
    assert (status.agents, status.limits.max_agents) == (MAX_AGENTS, MAX_AGENTS)
    assert status.counters.refusals == CONNECTIONS - MAX_AGENTS
    assert resident(broker) - before < MOST
    eventually(lambda: open_files(broker) < 3 * MAX_AGENTS)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_broker_of_a_trainer_that_publishes_to_nobody_stays_small(
    url: str, spawn: Spawn, raw: Callable[[], Raw], replicas: int
) -> None:
    broker = broker_process(spawn, url)
    trainer = raw()
    trainer.join(trainer_hello())
    before = resident(broker)
    for call in range(1, ROUNDS + 1):
        trainer.send(m.Open(1, call, Terms(call, min_replicas=replicas)))
        trainer.send(m.Batch(1, call, 0, [1], False, 1, total=1), bytes(400_000))
        if replicas:
            trainer.send(m.Void(1, call))
        result = trainer.receive(m.Finished).result
        assert result.outcome is (Outcome.FAILED if replicas else Outcome.EMPTY)
    assert resident(broker) - before < MOST
    status = trainer.status()
    assert status.channels[0].rounds == []


def test_what_a_broker_takes_on_is_in_its_status_under_the_names_of_its_settings(
    url: str, raw: Callable[[], Raw]
) -> None:
    limits = Limits(window=3, max_body_bytes=5000)
    running = Threaded(config_for(url, limits))
    try:
        asked = raw()
        assert asked.status().limits == limits
        _, body = asked.ask(QueryKind.STATUS)
        assert b'"max-body-bytes":5000' in body
    finally:
        running.stop()
