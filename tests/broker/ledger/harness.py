"""A desk to try the ledger at: agents say messages, and keep what they are told.

No socket, clock or process: `Desk` holds one ledger and the time, `Rank` and `Member` stand for a
trainer and a worker. Everything that the ledger keeps is validated after every event.

    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)                  # Open and one batch that is the last
    member.stages(0, vote=True)
    member.commits()
    assert rank.outcome() is Outcome.COMMITTED
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from tensorlease.broker.ledger import Ledger, Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import AnyState, Cause, Channel, Receiver, Round
from tensorlease.protocol import codec
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Distribution, LiveNote, Process

from .actors import Agent, Member, Rank

E = TypeVar("E", bound=fx.Effect)

COLOCATED, ASSEMBLED = Distribution.COLOCATED, Distribution.ASSEMBLED

__all__ = ["ASSEMBLED", "COLOCATED", "Agent", "Desk", "Member", "Rank"]


class Desk:
    """One ledger, the agents that talk to it, and what it asked for.

    Attributes:
        now: Monotonic seconds.
        ledger: The present run of the ledger.
        asked: Effects that are no messages, in order.
        seen: All transitions so far, of all runs.
        codes: All codes that an agent was told, or that a result carries.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.now = 1000.0
        self.runs = 0
        self.settings = settings or Settings()
        self.agents: dict[str, Rank | Member] = {}
        self.asked: list[fx.Effect] = []
        self.seen: set[tuple[AnyState, Cause]] = set()
        self.codes: set[Code] = set()
        self.ledger = self._run()

    def _run(
        self,
        expected: Sequence[str] = (),
        recover: bool = False,
        notes: dict[str, LiveNote] | None = None,
    ) -> Ledger:
        self.runs += 1
        epoch = f"{self.runs:016x}"
        return Ledger(
            epoch,
            self.settings,
            now=self.now,
            expected=expected,
            recover=recover,
            relays_noted=notes,
        )

    def configure(self, settings: Settings) -> None:
        """Starts anew with other settings; before anyone joins."""
        assert not self.agents
        self.settings = settings
        self.ledger = self._run()

    def restart(
        self,
        *expected: Rank | Member | str,
        recover: bool = False,
        noted: Sequence[Member] = (),
    ) -> None:
        """The broker dies with all that it knew; the next one expects these agents.

        noted: Relays whose live files say that others read for them.
        """
        notes = {member.instance: member.note_of() for member in noted}
        self.ledger = self._run([_name(agent) for agent in expected], recover, notes)

    # ------------------------------------------------------------ agents

    def trainer(
        self,
        rank: int = 0,
        of: int = 1,
        *,
        channel: str = "policy",
        group: str = "run",
        device: str = "cpu:0",
        host: str = "host",
        distribution: Distribution | None = None,
        pid: int | None = None,
        joined: bool = True,
    ) -> Rank:
        """Returns a trainer that has joined; of several ranks, `assembled` is the default."""
        instance = self._instance()
        by_default = COLOCATED if of == 1 else ASSEMBLED
        agent = Rank(self, instance, channel, host, device, pid, rank, of, group)
        agent.distribution = distribution or by_default
        self.agents[instance] = agent
        if joined:
            agent.hello()
        return agent

    def worker(
        self,
        replica: str = "a",
        member: int = 0,
        of: int = 1,
        *,
        channel: str = "policy",
        device: str = "cpu:0",
        host: str = "host",
        version: int = 0,
        pid: int | None = None,
        joined: bool = True,
        readers: Sequence[int] | None = None,
    ) -> Member:
        """Returns a worker that has joined."""
        instance = self._instance()
        agent = Member(self, instance, channel, host, device, pid, replica, member, of)
        agent.version = version
        if readers is not None:
            agent.readers = [Process(reader, 9) for reader in readers]
        self.agents[instance] = agent
        if joined:
            agent.hello()
        return agent

    def engine(self, replica: str = "a", of: int = 2) -> list[Member]:
        """Returns all workers of one replica."""
        return [self.worker(replica, member, of) for member in range(of)]

    def _instance(self) -> str:
        """Returns the next instance id: 16 hexadecimal digits, of which the first 8 differ too."""
        return f"{len(self.agents) + 1:08x}" * 2

    # ------------------------------------------------------------ events

    def feed(self, effects: Iterable[fx.Effect], source: Rank | Member | None = None) -> None:
        """Hands out what the ledger asked for, and checks all that it keeps."""
        for effect in effects:
            match effect:
                case fx.Send():
                    self._told(self.agents[effect.to], effect.message, effect.body)
                case fx.Answer():
                    assert source is not None
                    self._told(source, effect.message, None)
                case _:
                    self.asked.append(effect)
        self.ledger.validate()
        self.seen |= self.ledger.book.seen
        for rnd in self.ledger.book.rounds():
            self._note_codes(rnd)

    def _told(self, agent: Rank | Member, message: m.FromBroker, body: bytes | None) -> None:
        # What the ledger says must be within the limits that every agent checks.
        assert codec.decode_from_broker(codec.encode(message)) == message
        agent.heard.append(message)
        agent.bodies.append(body)
        code = getattr(message, "code", None)
        if isinstance(code, Code):
            self.codes.add(code)
        agent.on_told(message)

    def _note_codes(self, rnd: Round) -> None:
        self.codes |= {r.code for r in rnd.receivers.values() if r.code is not None}
        for code in (Code.NO_SOURCE, Code.NOT_AT_BASE):
            if any(result.reason.startswith(f"{code.value}:") for result in rnd.unserved):
                self.codes.add(code)

    def wait(self, seconds: float, *, silent: Sequence[Rank | Member] = ()) -> None:
        """Time passes; everyone beats but the silent, the departed and the disconnected."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.ledger.next_check, self.now + 0.001))
            for agent in self.agents.values():
                if agent.connected and agent not in silent:
                    agent.say(m.Beat(agent.session, progress=agent.progress))
            self.feed(self.ledger.tick(self.now))

    def stop(self) -> None:
        self.feed(self.ledger.stop(self.now))

    def resume(self) -> None:
        self.feed(self.ledger.resume(self.now))

    # ------------------------------------------------------------ looking

    def requests(self, kind: type[E]) -> list[E]:
        """Returns the effects of this kind so far."""
        return [effect for effect in self.asked if isinstance(effect, kind)]

    def channel(self, name: str = "policy") -> Channel:
        return self.ledger.state.channels[name]

    def current(self, replica: str = "a", *, channel: str = "policy") -> tuple[int, bool]:
        """Returns the version that the replica is at (0: none), and whether it is torn."""
        found = self.channel(channel)
        return self.ledger.book.current(found, found.replicas[replica])

    def round(self, call: int = 1, *, channel: str = "policy") -> Round:
        """Returns the round, under way or not yet forgotten."""
        found = [rnd for rnd in self.channel(channel).rounds.values() if rnd.call == call]
        assert len(found) == 1, f"rounds of call {call}: {found}"
        return found[0]

    def receiver(self, agent: Member, call: int = 1) -> Receiver:
        return self.round(call, channel=agent.channel).receivers[agent.instance]

    def forgotten(self, call: int = 1, *, channel: str = "policy") -> bool:
        """Whether nobody needs the round any more: its story alone is kept."""
        return all(rnd.call != call for rnd in self.channel(channel).rounds.values())


def _name(agent: Rank | Member | str) -> str:
    return agent if isinstance(agent, str) else agent.instance
