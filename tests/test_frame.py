"""What `top` shows: who stands where, who is waited for, and what fits on a terminal."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console

from tensorlease.broker.queries import Counters, ReceiverStatus, ReplicaStatus, Status
from tensorlease.commands.frame import Rates, frame, rates
from tensorlease.commands.standing import rows, stages, stragglers
from tensorlease.commands.units import per_second, size

from .test_concerns import agent, channel, ended, rnd, status


def receiver(name: str, state: str, still_s: float = 0.0, **more: object) -> ReceiverStatus:
    replica, _, member = name.partition("/")
    made = ReceiverStatus(name, replica, int(member), 7, state, 2, 2**20, still_s, False, "")
    return msgspec.structs.replace(made, **more)


def fleet(count: int) -> list[ReplicaStatus]:
    """Replicas `e0`, `e1`, ... of one worker each, whose instance is `e0/0`, ..."""
    return [
        ReplicaStatus(
            f"e{n}", 1, 5, False, True, "", [msgspec.structs.replace(agent(), instance=f"e{n}/0")]
        )
        for n in range(count)
    ]


def shown(
    seen: Status, rate: Rates | None, *, height: int | None = None, width: int = 150
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(seen, rate, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_who_is_behind_while_half_of_the_others_are_further_is_a_straggler() -> None:
    two = [receiver("a/0", "staging"), receiver("a/1", "voted")]
    assert stragglers(rnd(receivers=two)) == {"a/0"}
    three = [*two, receiver("a/2", "staging")]
    assert stragglers(rnd(receivers=three)) == set()
    assert stragglers(rnd(receivers=[*three, receiver("a/3", "voted")])) == {"a/0", "a/2"}


def test_one_alone_or_all_in_step_keep_nobody_waiting() -> None:
    assert stragglers(rnd(receivers=[receiver("a/0", "staging")])) == set()
    in_step = [receiver("a/0", "staging"), receiver("a/1", "staging")]
    assert stragglers(rnd(receivers=in_step)) == set()


def test_who_is_out_of_the_round_keeps_nobody_waiting() -> None:
    receivers = [receiver("a/0", "draining"), receiver("a/1", "voted"), receiver("a/2", "voted")]
    assert stragglers(rnd(receivers=receivers)) == set()


def test_the_stages_are_counted_in_their_order_and_those_out_of_them_last() -> None:
    states = ("voted", "preparing", "out", "voted", "staging")
    receivers = [receiver(f"a/{n}", state) for n, state in enumerate(states)]
    assert stages(rnd(receivers=receivers)) == "1 preparing, 1 staging, 2 voted, 1 out"


def test_the_stuck_come_first_then_the_stragglers_then_who_has_stood_still_longest() -> None:
    receivers = [
        receiver("e0/0", "voted", 1.0),
        receiver("e1/0", "voted", 2.0),
        receiver("e2/0", "staging", 0.5),
        receiver("e3/0", "draining", 0.1, stuck=True, reason="was not ready in 3 s"),
    ]
    versions = {f"e{n}": "5" for n in range(5)}
    found = rows(channel(replicas=fleet(5), rounds=[rnd(receivers=receivers)]), versions)
    assert [row.worker for row in found] == ["e3/0", "e2/0", "e1/0", "e0/0", "e4/0"]
    assert (found[0].stage, found[0].note) == ("stuck", "was not ready in 3 s")
    assert found[1].straggles and found[4].stage == "idle"


def test_a_worker_whose_part_in_an_ended_round_is_over_is_idle() -> None:
    over = rnd("finished", receivers=[receiver("e0/0", "committed"), receiver("e1/0", "draining")])
    found = rows(channel(replicas=fleet(2), rounds=[over]), {"e0": "5", "e1": "5"})
    assert {row.worker: row.stage for row in found} == {"e0/0": "idle", "e1/0": "draining"}


def test_a_holder_that_is_no_member_any_more_is_still_shown() -> None:
    gone = rnd("finished", receivers=[receiver("old/0", "out", stuck=True)])
    (row,) = rows(channel(replicas=[], rounds=[gone]), {})
    assert (row.worker, row.stage, row.bad) == ("old/0", "stuck", True)


def test_on_a_low_terminal_the_most_pressing_workers_are_shown_and_the_rest_are_counted() -> None:
    receivers = [receiver(f"e{n}/0", "voted", n / 10) for n in range(99)]
    receivers.append(receiver("e99/0", "staging"))
    seen = status(channel(replicas=fleet(100), rounds=[rnd(receivers=receivers)]))
    lines = shown(seen, None, height=24)
    assert len(lines) <= 24
    assert "e99/0" in lines[5] and "the others wait for it" in lines[5]
    (more,) = [line for line in lines if "more workers" in line]
    workers = sum("/0 " in line for line in lines[5:-2])
    assert more == f"and {100 - workers} more workers"
    assert len(shown(seen, None)) > 100


def test_a_line_that_is_too_long_is_cut_and_takes_no_second_one() -> None:
    long = channel(ended=[ended("failed", "x" * 500)])
    assert all(len(line) <= 60 for line in shown(status(long), None, width=60))
    assert len(shown(status(long), None, width=60)) == len(shown(status(long), None, width=600))


def test_rates_are_of_the_time_between_two_looks_at_one_broker() -> None:
    before = status(counters=Counters(messages_received=100, messages_sent=10))
    seen = status(counters=Counters(messages_received=300, messages_sent=15))
    assert rates(before, seen, 2.0) == Rates(100.0, 2.5)
    assert rates(None, seen, 2.0) is None
    assert rates(msgspec.structs.replace(before, epoch="another"), seen, 2.0) is None
    assert "messages 100/s in, 2.5/s out" in shown(seen, Rates(100.0, 2.5))[0]


def test_rounds_and_bytes_a_second_and_the_last_rounds_are_shown() -> None:
    rounds = [ended("committed") for _ in range(5)]
    lines = shown(status(channel(rounds_per_s=2.5, bytes_per_s=3 * 2**20, ended=rounds)), None)
    assert any("2.5/s rounds, 3.0 MiB/s" in line for line in lines)
    assert sum("1 s ago: round 5 took 40 ms" in line for line in lines) == 3


def test_amounts_are_short_to_read() -> None:
    assert [size(n) for n in (5, 1536, 2**31)] == ["5 B", "1.5 KiB", "2.0 GiB"]
    assert [per_second(n) for n in (0.25, 12.3)] == ["0.2/s", "12/s"]
