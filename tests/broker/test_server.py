"""A real broker: sessions, death, restarts, its start and its end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from tensorlease.agents.live import LiveLock
from tensorlease.agents.process import this_process
from tensorlease.broker.config import Durations
from tensorlease.broker.locks import BrokerRunningError
from tensorlease.broker.stories import Story
from tensorlease.protocol import messages as m
from tensorlease.protocol.errors import InternalError
from tensorlease.protocol.records import (
    Code,
    Fate,
    LeaseNote,
    Outcome,
    Process,
    QueryKind,
    ReplicaState,
    Terms,
    TrainerRound,
    WorkerRound,
)

from .raw_agents import (
    DEADLINE_S,
    Raw,
    Spawn,
    Threaded,
    agent_process,
    broker_process,
    config_for,
    eventually,
    listens,
    trainer_hello,
    worker_hello,
)

# ---------------------------------------------------------------- sessions


def test_a_hello_is_welcomed_and_a_whole_round_goes_through(
    threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    trainer, worker = raw(), raw()
    hello = worker_hello()
    worker.join(hello)
    welcome = trainer.join(trainer_hello())
    assert welcome.session == 1 and welcome.group.startswith("group")
    group = welcome.group
    trainer.send(m.Open(1, 1, Terms(5)))
    trainer.send(m.Batch(1, 1, 0, [0], False, 1000, total=1), b"table and handles")
    assert worker.receive(m.Prepare).terms.version == 5
    message, body = worker.receive_any()
    assert isinstance(message, m.Deliver)
    assert (message.total, body) == (1, b"table and handles")
    assert worker.status().channels[0].rounds[0].held_bytes == 1000
    worker.send(m.Staged(1, group, 1, 0, 0, vote=True))
    worker.receive(m.Commit)
    assert trainer.receive(m.Release).seq == 0
    worker.send(m.Committed(1, group, 1, True))
    result = trainer.receive(m.Finished).result
    assert (result.outcome, result.receivers[0].fate) == (Outcome.COMMITTED, Fate.COMMITTED)

    replica = worker.status().channels[0].replicas[0]
    assert (replica.replica, replica.current, replica.members[0].pid) == ("r0", 5, os.getpid())
    reply, body = worker.ask(QueryKind.STORY, "policy", 5)
    told = msgspec.json.decode(body, type=Story).rounds[0]
    texts = [line.text for line in told.lines]
    assert reply.code is None and told.outcome == "committed"
    order = ["opened", "batch 0.0 (1000 bytes) leased", "batch 0.0 (1000 bytes) released"]
    assert [text for text in texts if text in order] == order
    assert worker.ask(QueryKind.STORY, "policy", 6)[0].code is Code.NO_ROUND


def test_a_drain_query_ends_admission(threaded: Threaded, raw: Callable[[], Raw]) -> None:
    agent = raw()
    assert agent.ask(QueryKind.DRAIN)[0].code is None
    assert agent.status().stopping


def test_the_identity_is_what_the_hello_says_and_not_the_transports(
    threaded: Threaded, context: zmq.Context[zmq.Socket[bytes]], url: str
) -> None:
    first = Raw(context, url, id=b"w3")
    second = Raw(context, url, id=secrets.token_bytes(32))
    first.join(worker_hello("w7"))
    second.join(worker_hello("w3"))
    names = [replica.replica for replica in second.status().channels[0].replicas]
    assert names == ["w3", "w7"]


def test_an_unknown_connection_is_asked_who_it_is_but_not_for_every_message(
    threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    agent = raw()
    for _ in range(50):
        agent.send(m.Beat(3))
    epoch = agent.receive(m.WhoAreYou).epoch
    status = agent.status()
    assert (status.epoch, status.agents) == (epoch, 0)
    assert threaded.sent.count(("sent", "WhoAreYou")) == 1


def test_two_agents_in_one_place_are_told_apart_by_name(
    url: str, threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    first, second = raw(), raw()
    held = worker_hello("r0")
    first.join(held)
    second.send(worker_hello("r0"))
    refused = second.receive(m.Refused)
    assert (refused.code, refused.retry) == (Code.PLACE_TAKEN, True)
    assert str(os.getpid()) in refused.text and held.instance in refused.text
    first.beat()


def test_a_new_connection_of_an_instance_replaces_the_old_one(
    threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    first, second = raw(), raw()
    hello = worker_hello()
    first.join(hello)
    second.join(worker_hello(instance=hello.instance, session=2))
    first.send(m.Beat(1))
    first.receive(m.WhoAreYou)
    second.send(m.Beat(2))
    second.receive(m.BeatOk)


def test_after_goodbye_the_place_is_free(threaded: Threaded, raw: Callable[[], Raw]) -> None:
    first, second = raw(), raw()
    first.join(worker_hello("r0"))
    first.send(m.Bye(1))
    first.receive(m.ByeOk)
    second.join(worker_hello("r0"))
    assert second.status().agents == 1


def test_a_process_that_is_another_than_the_one_named_is_refused(
    threaded: Threaded, raw: Callable[[], Raw]
) -> None:
    me = this_process()
    lies = [
        Process(me.pid, me.start + 1, me.namespace),
        Process(os.getppid(), me.start, me.namespace),
    ]
    for lie in lies:
        agent = raw()
        agent.send(msgspec.structs.replace(worker_hello(), processes=[lie]))
        assert agent.receive(m.Refused).code is Code.UNPROVEN_PROCESS
    assert raw().status().agents == 0


# ---------------------------------------------------------------- death and restart


@pytest.mark.process
def test_a_killed_worker_is_known_to_be_gone_within_a_second(
    url: str, threaded: Threaded, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    trainer = raw()
    trainer.join(trainer_hello())
    worker = agent_process(spawn, url, "r0")
    assert worker.line().startswith("Welcome")
    while not trainer.receive(m.Members).replicas:
        pass
    began = time.monotonic()
    worker.signal(signal.SIGKILL)
    while trainer.receive(m.Members).replicas:
        pass
    assert time.monotonic() - began < 1.0
    assert trainer.status().agents == 1


@pytest.mark.process
def test_a_worker_that_restarts_while_the_broker_is_busy_takes_its_place_again(
    url: str, threaded: Threaded, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    trainer = raw()
    trainer.join(trainer_hello())
    first = agent_process(spawn, url, "r0", "chatty")
    assert first.line().startswith("Welcome")
    threaded.call(lambda: time.sleep(1.0))
    first.signal(signal.SIGKILL)
    second = agent_process(spawn, url, "r0", "insist")
    began = time.monotonic()
    while not (line := second.line()).startswith("Welcome"):
        assert line.startswith("Refused")
    assert time.monotonic() - began < 5
    trainer.send(m.Open(1, 1, Terms(1)))
    assert second.line() == "Prepare"


@pytest.mark.process
def test_a_killed_broker_is_replaced_and_asks_agents_who_they_are(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    first = broker_process(spawn, url)
    agent = raw()
    hello = worker_hello(locked=True)
    lock = LiveLock(f"{url.removeprefix('ipc://')}.live", hello.instance)
    lock.acquire()
    former = agent.join(hello).epoch
    doomed = agent_process(spawn, url, "r1", "locked")
    dead = doomed.line().split()[1]
    first.signal(signal.SIGKILL)
    first.end()
    doomed.signal(signal.SIGKILL)
    doomed.end()
    late = agent_process(spawn, url, "r2", "locked")  # Waits for the broker, with its lock.
    eventually(lambda: len(os.listdir(f"{url.removeprefix('ipc://')}.live")) == 3)

    broker_process(spawn, url)
    agent.send(m.Beat(1))
    epoch = agent.receive(m.WhoAreYou).epoch
    assert epoch != former
    status = raw().status()
    assert status.recovering_s > 0
    assert hello.instance in status.expected and dead in status.expected
    # Its lock is free: that it is gone is settled long before the window ends.
    eventually(lambda: dead not in raw().status().expected)
    assert hello.instance in raw().status().expected
    welcome = agent.join(worker_hello(instance=hello.instance, session=2, locked=True))
    assert welcome.epoch == epoch
    assert late.line().startswith("Welcome")
    # Everyone who lives has spoken: nobody waits for the deadline.
    assert agent.status().recovering_s == 0
    # The proof of a death is removed when nobody needs it.
    eventually(lambda: dead not in os.listdir(f"{url.removeprefix('ipc://')}.live"))
    lock.release()


def test_a_broker_without_a_stderr_runs(url: str, spawn: Spawn, raw: Callable[[], Raw]) -> None:
    words = [sys.executable, "-m", "tensorlease.cli", "broker", "--endpoint", url]
    program = f"import os; os.close(2); os.execv({words[0]!r}, {words!r})"
    spawn("-c", program)
    eventually(lambda: listens(url))
    raw().join(worker_hello())


def test_the_live_file_of_who_left_and_died_before_it_heard_so_is_removed(
    url: str, spawn: Spawn, threaded: Threaded
) -> None:
    live = f"{url.removeprefix('ipc://')}.live"
    agent = agent_process(spawn, url, "r0", "leaving")
    instance = agent.line().split()[1]
    assert agent.line() == "ByeOk"
    assert instance in os.listdir(live)  # It holds its lock still.
    agent.signal(signal.SIGKILL)
    eventually(lambda: instance not in os.listdir(live))
    eventually(lambda: not threaded.broker._dispatcher.dead)


@pytest.mark.process
def test_an_agent_that_dies_unannounced_does_not_keep_a_restarted_broker_waiting(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    first = broker_process(spawn, url)
    agent = agent_process(spawn, url, "r0", "locked")
    assert agent.line().startswith("Welcome")
    first.signal(signal.SIGKILL)
    first.end()
    agent.signal(signal.SIGSTOP)
    broker_process(spawn, url)
    query = raw()
    assert query.status().expected
    agent.signal(signal.SIGKILL)
    assert eventually(lambda: query.status().recovering_s == 0) < 5


@pytest.mark.process
def test_who_dies_with_the_broker_is_lost_to_its_round_however_quickly_the_others_return(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    first = broker_process(spawn, url)
    trainer, worker = raw(), raw()
    hello, publishes = worker_hello("r0", locked=True), trainer_hello()
    lock = LiveLock(f"{url.removeprefix('ipc://')}.live", hello.instance)
    lock.acquire()
    worker.join(hello)
    doomed = agent_process(spawn, url, "r1", "locked")
    assert doomed.line().startswith("Welcome")
    group = trainer.join(publishes).group
    terms = Terms(1)
    batch = m.Batch(1, 1, 0, [0], False, 8, 1)
    trainer.send(m.Open(1, 1, terms))
    trainer.send(batch, b"table")
    receivers = trainer.receive(m.Opened).receivers
    worker.receive(m.Deliver)
    first.signal(signal.SIGKILL)
    first.end()
    doomed.signal(signal.SIGKILL)
    doomed.end()

    broker_process(spawn, url)
    told = TrainerRound(1, terms, receivers, [LeaseNote(0, [0], False, 8, False)], 1)
    trainer.join(msgspec.structs.replace(publishes, session=2, group=group, rounds=[told]))
    trainer.send(msgspec.structs.replace(batch, session=2), b"table")
    inside = WorkerRound(group, 1, terms, receivers, [], [], False)
    worker.join(msgspec.structs.replace(hello, session=2, round=inside))
    # Nothing is decided before the death of the other is settled.
    worker.receive(m.Deliver)
    worker.send(m.Staged(2, group, 1, 0, 0, vote=True))
    worker.receive(m.Commit)
    worker.send(m.Committed(2, group, 1, ok=True))
    result = trainer.receive(m.Finished).result
    assert result.outcome is Outcome.MIXED, result
    assert {r.replica: r.fate for r in result.receivers} == {
        "r0": Fate.COMMITTED,
        "r1": Fate.LOST,
    }
    lock.release()


@pytest.mark.process
def test_what_was_sent_while_no_broker_was_there_is_not_acted_upon(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    early = raw()
    for _ in range(60):
        early.send(m.Beat(1))
        early.send(m.Staged(1, "group", 1, 0, 0, vote=True))
    broker_process(spawn, url)
    early.receive(m.WhoAreYou)
    status = early.status()
    assert (status.agents, status.channels) == (0, [])
    early.join(worker_hello(session=2))


@pytest.mark.process
def test_the_broker_kills_itself_where_a_fault_test_asks(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    environ = os.environ | {"TENSORLEASE_TEST_KILL": "sent:Welcome:2"}
    child = broker_process(spawn, url, env=environ)
    raw().join(worker_hello("r0"))
    raw().join(worker_hello("r1"))
    assert child.end()[0] == -signal.SIGKILL


# ---------------------------------------------------------------- starting and ending


def test_a_second_broker_in_one_place_is_refused(url: str, threaded: Threaded) -> None:
    second = Threaded(config_for(url))
    second.join()
    assert isinstance(second.error, BrokerRunningError)
    assert second.error.pid == os.getpid()
    assert Path(url.removeprefix("ipc://")).exists()


@pytest.mark.process
def test_a_frozen_peer_does_not_keep_a_broker_that_is_told_to_end(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    child = broker_process(spawn, url)
    trainer = raw()
    trainer.join(trainer_hello())
    frozen = agent_process(spawn, url, "r0")
    assert frozen.line().startswith("Welcome")
    frozen.signal(signal.SIGSTOP)
    for number in range(50):
        trainer.send(m.Offer(1, number, [number], 1), b"t" * 100_000)
    trainer.beat()
    began = time.monotonic()
    child.signal(signal.SIGTERM)
    trainer.receive(m.Stopping)
    code, errors = child.end()
    assert (code, time.monotonic() - began < 5) == (0, True), errors
    assert os.listdir(os.path.dirname(url.removeprefix("ipc://"))) == []


@pytest.mark.process
def test_a_broker_told_to_end_waits_for_the_round_under_way_and_a_second_signal_does_not(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    child = broker_process(spawn, url)
    trainer, worker = raw(), raw()
    trainer.join(trainer_hello())
    worker.join(worker_hello())
    trainer.send(m.Open(1, 1, Terms(1)))
    worker.receive(m.Prepare)
    child.signal(signal.SIGTERM)
    eventually(lambda: trainer.status().stopping)
    trainer.send(m.Batch(1, 1, 0, [0], False, 1, total=1), b"table")
    worker.receive(m.Deliver)
    child.signal(signal.SIGINT)
    assert child.end(2)[0] == 0


@pytest.mark.process
def test_sighup_changes_the_log_and_names_what_it_cannot_change(
    url: str, spawn: Spawn, tmp_path: Path
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text('[log]\nlevel = "info"\n')
    child = broker_process(spawn, url, "--config", str(file))
    file.write_text('[log]\nlevel = "debug"\n[durations]\nopen = 5\n')
    assert child.process.stderr is not None
    child.signal(signal.SIGHUP)
    said = child.process.stderr
    wanted = {
        "durations.open changed in the settings; it takes a restart",
        "log.level is now LogLevel.DEBUG",
    }
    while wanted:  # Among others: a busy machine has it say that it was busy.
        line = said.readline()
        assert line
        wanted -= {text for text in wanted if text in line}
    file.write_text("nonsense = 1\n")
    child.signal(signal.SIGHUP)
    while "settings were not read again" not in (line := said.readline()):
        assert line
    child.signal(signal.SIGTERM)
    assert child.end()[0] == 0


SIGNALLED_AS_IT_BINDS = """
import os, signal, sys
from tensorlease.broker.endpoints import SocketPlace
bind = SocketPlace.bind

def signalled(place, *how):
    bind(place, *how)
    os.kill(os.getpid(), signal.SIGHUP)

SocketPlace.bind = signalled
from tensorlease.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_a_signal_that_comes_as_soon_as_it_listens_is_heard(url: str, spawn: Spawn) -> None:
    child = spawn("-P", "-c", SIGNALLED_AS_IT_BINDS, "broker", "--endpoint", url)
    assert child.process.stderr is not None
    while "SIGHUP: no setting changed" not in (line := child.process.stderr.readline()):
        assert line
    child.signal(signal.SIGTERM)
    assert child.end()[0] == 0


def test_a_defect_ends_the_broker_at_once_and_with_an_error(
    url: str, raw: Callable[[], Raw], caplog: pytest.LogCaptureFixture
) -> None:
    running = Threaded(config_for(url))

    def breaks(message: object, now: float) -> None:
        raise InternalError("round r: no transition; its story: opened")

    running.broker.ledger.hello = breaks  # type: ignore[method-assign,assignment]
    raw().send(worker_hello())
    running.join()
    assert isinstance(running.error, InternalError)
    assert "its story: opened" in str(running.error)
    assert "a defect ends the broker" in caplog.text


def test_systemd_hears_of_the_start_the_life_and_the_end(url: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(DEADLINE_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        running = Threaded(config_for(url), environ)
        said = b""
        while b"READY=1" not in said or b"WATCHDOG=1" not in said:
            said += listener.recv(4096)
        running.stop()
        while b"STOPPING=1" not in said:
            said += listener.recv(4096)


def test_a_silent_agent_is_seen_until_it_is_heard_again(
    url: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    config = msgspec.structs.replace(config_for(url), durations=Durations(beat=0.1, silent=0.5))
    running = Threaded(config)
    try:
        beating, silent = Raw(context, url), Raw(context, url)
        beating.join(worker_hello("beating"))
        silent.join(worker_hello("silent"))

        def states() -> dict[str, str]:
            beating.beat()
            found = beating.status().channels[0].replicas
            return {replica.replica: replica.members[0].state for replica in found}

        eventually(lambda: states() == {"beating": "live", "silent": "silent"})
        silent.beat()
        assert states() == {"beating": "live", "silent": "live"}
    finally:
        running.stop()


@pytest.mark.process
def test_a_broker_that_was_stopped_itself_takes_nobody_for_silent(
    url: str, spawn: Spawn, raw: Callable[[], Raw]
) -> None:
    flags = ("--durations-beat", "0.5", "--durations-silent", "1.2")
    child = broker_process(spawn, url, *flags)
    trainer, worker = raw(), raw()
    worker.join(worker_hello())
    trainer.join(trainer_hello())
    child.signal(signal.SIGSTOP)
    for _ in range(4):
        threading.Event().wait(0.4)  # Longer than an agent may be silent, in all.
        worker.send(m.Beat(1))
        trainer.send(m.Beat(1))
    child.signal(signal.SIGCONT)
    states: list[ReplicaState] = []
    trainer.send(m.Query(1, QueryKind.STATUS))
    judged = time.monotonic() + 0.6
    while (left_s := judged - time.monotonic()) > 0:
        if trainer.socket.poll(round(left_s * 1000) + 1):
            message, _ = trainer.receive_any()
            states += message.replicas if isinstance(message, m.Members) else []
    assert {state.reason for state in states} == {""}
    child.signal(signal.SIGTERM)
    assert "was stopped or busy for 1." in child.end()[1]
