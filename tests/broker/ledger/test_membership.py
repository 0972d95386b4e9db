"""Who is there: hellos, sessions, places, silence, departure and death."""

from __future__ import annotations

from msgspec.structs import replace

from tensorlease.broker.ledger import Settings
from tensorlease.broker.ledger import effects as fx
from tensorlease.broker.ledger.state import PeerState
from tensorlease.protocol import messages as m
from tensorlease.protocol.records import Code, Phase

from .harness import Agent, Desk


def state_of(desk: Desk, agent: Agent) -> PeerState:
    return desk.ledger.state.peers[agent.instance].state


def test_a_hello_is_watched_then_welcomed_in_its_session(desk: Desk) -> None:
    member = desk.worker("a")
    assert desk.asked == [
        fx.Watch(member.instance, member.processes, True),
        fx.BeginSession(member.instance),
    ]
    welcome = member.last(m.Welcome)
    assert (welcome.session, welcome.group, welcome.last_version) == (1, "", 0)
    assert welcome.to == member.instance
    assert welcome.epoch == desk.ledger.state.epoch


def test_a_welcome_carries_the_window_and_the_durations(desk: Desk) -> None:
    desk.configure(Settings(window=3, max_body=1000))
    welcome = desk.trainer().last(m.Welcome)
    assert (welcome.window, welcome.max_body) == (3, 1000)
    assert welcome.durations == Settings().durations


def test_a_second_hello_begins_a_new_session_of_the_same_agent(desk: Desk) -> None:
    member = desk.worker("a")
    member.hello()
    assert member.last(m.Welcome).session == 2
    assert len(desk.ledger.state.peers) == 1
    assert len(desk.requests(fx.Watch)) == 1


def test_a_hello_of_an_older_session_is_refused_and_the_open_one_not_touched(desk: Desk) -> None:
    member = desk.worker("a")
    old = member.hello_message()
    member.hello()
    member.greet(old)
    assert member.last(m.Refused).code is Code.STALE_SESSION
    member.say(m.Beat(member.session))
    assert state_of(desk, member) is PeerState.LIVE


def test_a_message_of_an_older_session_is_dropped(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    late = m.Staged(member.session, *member.key, 0, 0, True)
    member.hello(round=member.inside())
    member.say(late)
    assert rank.released() == []


def test_a_message_of_an_unknown_agent_is_dropped(desk: Desk) -> None:
    stranger = desk.worker("a", joined=False)
    stranger.say(m.Beat(1))
    assert stranger.heard == []


def test_an_agent_of_another_protocol_is_refused_with_the_versions(desk: Desk) -> None:
    member = desk.worker("a", joined=False)
    member.greet(replace(member.hello_message(), protocol=(7, 9)))
    refused = member.last(m.Refused)
    assert (refused.code, refused.retry) == (Code.BAD_VERSION, False)
    assert "7 to 9" in refused.text


def test_an_instance_that_names_another_place_is_refused(desk: Desk) -> None:
    member = desk.worker("a")
    member.greet(replace(member.hello_message(), replica="b"))
    assert member.last(m.Refused).code is Code.INSTANCE_TAKEN
    assert "b" not in desk.channel().replicas


def test_an_instance_that_names_another_channel_is_refused(desk: Desk) -> None:
    rank = desk.trainer()
    rank.greet(replace(rank.hello_message(), channel="critic"))
    assert rank.last(m.Refused).code is Code.INSTANCE_TAKEN


def test_a_full_broker_refuses_and_says_that_later_may_do(desk: Desk) -> None:
    desk.configure(Settings(max_peers=1))
    desk.worker("a")
    second = desk.worker("b")
    refused = second.last(m.Refused)
    assert (refused.code, refused.retry) == (Code.BROKER_FULL, True)
    assert "max-agents is 1" in refused.text


def test_a_member_number_beyond_its_replica_is_refused(desk: Desk) -> None:
    member = desk.worker("a", 2, 2)
    assert member.last(m.Refused).code is Code.REPLICA_SIZE


def test_a_member_of_another_size_than_its_replica_is_refused(desk: Desk) -> None:
    desk.worker("a", 0, 2)
    other = desk.worker("a", 1, 4)
    assert other.last(m.Refused).code is Code.REPLICA_SIZE
    assert "has 2 members, not 4" in other.last(m.Refused).text


def test_a_taken_place_is_refused_with_the_holders_pid(desk: Desk) -> None:
    desk.worker("a", pid=4711)
    second = desk.worker("a")
    refused = second.last(m.Refused)
    assert (refused.code, refused.retry) == (Code.PLACE_TAKEN, True)
    assert "pid 4711" in refused.text


def test_a_place_is_free_when_its_holder_left(desk: Desk) -> None:
    desk.worker("a").leave()
    second = desk.worker("a")
    assert second.got(m.Welcome)


def test_a_place_is_free_when_its_holder_is_gone(desk: Desk) -> None:
    desk.worker("a").gone()
    assert desk.worker("a").got(m.Welcome)


def test_a_silent_worker_keeps_its_place_until_a_round_put_it_out(desk: Desk) -> None:
    member = desk.worker("a")
    desk.wait(6, silent=[member])
    assert desk.worker("a").last(m.Refused).code is Code.PLACE_TAKEN


def test_a_place_is_free_when_its_holder_was_expelled_as_silent(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.wait(61, silent=[member])
    second = desk.worker("a")
    assert second.got(m.Welcome)
    # The old leases stay with the old instance.
    assert rank.released() == []
    member.hello()
    assert member.got(m.Welcome)
    assert desk.channel().replicas["a"].members == {0: second.instance}
    assert rank.released() == [0]


def test_an_agent_that_left_is_told_so_and_its_watch_ends(desk: Desk) -> None:
    member = desk.worker("a")
    member.leave()
    assert member.kinds()[-1] is m.ByeOk
    assert desk.asked[-2:] == [fx.EndSession(member.instance), fx.Unwatch(member.instance)]
    assert desk.ledger.state.peers == {}
    assert "a" not in desk.channel().replicas


def test_what_a_gone_agent_left_in_shared_memory_is_swept(desk: Desk) -> None:
    rank = desk.trainer()
    rank.gone()
    assert fx.Sweep(rank.instance) in desk.asked
    assert fx.Unwatch(rank.instance) in desk.asked


def test_the_death_of_a_stranger_changes_nothing(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.feed(desk.ledger.gone("f" * 16, "killed", desk.now))
    member.serves()
    assert rank.result().outcome.value == "committed"


def test_a_dropped_session_is_sent_nothing_until_the_next_hello(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    member.stages(0)
    member.drop()
    assert state_of(desk, member) is PeerState.AWAY
    member.forget()
    rank.void()
    assert member.heard == []
    member.hello(round=member.inside((0, 0)))
    assert state_of(desk, member) is PeerState.LIVE
    assert member.kinds() == [m.Welcome, m.Expelled]


def test_a_dropped_session_of_a_stranger_changes_nothing(desk: Desk) -> None:
    desk.feed(desk.ledger.session_lost("f" * 16, desk.now))
    assert desk.asked == []


def test_who_is_not_heard_for_five_seconds_is_silent_until_heard_again(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    desk.wait(6, silent=[member])
    assert state_of(desk, member) is PeerState.SILENT
    assert rank.last(m.Members).replicas[0].ready is False
    assert rank.last(m.Members).replicas[0].reason == "member 0 silent"
    member.say(m.Beat(member.session))
    assert state_of(desk, member) is PeerState.LIVE
    assert rank.last(m.Members).replicas[0].ready is True


def test_a_silent_worker_is_silent_still_when_its_session_is_dropped(desk: Desk) -> None:
    member = desk.worker("a")
    desk.wait(6, silent=[member])
    member.drop()
    assert state_of(desk, member) is PeerState.SILENT
    member.hello()
    assert state_of(desk, member) is PeerState.LIVE


def test_a_dropped_worker_that_does_not_return_is_silent(desk: Desk) -> None:
    member = desk.worker("a")
    member.drop()
    desk.wait(6)
    assert state_of(desk, member) is PeerState.SILENT
    member.hello()
    assert state_of(desk, member) is PeerState.LIVE


def test_a_silent_agent_is_sent_what_it_must_know_while_its_session_stands(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    rank.publish(1)
    desk.wait(6, silent=[member])
    rank.void()
    assert member.last(m.Abort).code is Code.VOID


def test_a_beat_is_answered(desk: Desk) -> None:
    member = desk.worker("a")
    effects = desk.ledger.message(
        member.instance, m.Beat(member.session, Phase.IDLE, 1), b"", desk.now
    )
    assert effects == [fx.Send(member.instance, m.BeatOk(desk.ledger.state.epoch, member.instance))]


def test_a_message_of_the_wrong_kind_of_agent_is_refused_by_name(desk: Desk) -> None:
    rank, member = desk.trainer(), desk.worker("a")
    member.say(m.Close(member.session, 1, 1))
    assert member.last(m.Refused).code is Code.BAD_MESSAGE
    assert "Close" in member.last(m.Refused).text
    rank.say(m.Ready(rank.session, "run", 1))
    assert "Ready" in rank.last(m.Refused).text


def test_trainers_are_told_of_every_change_of_the_replicas(desk: Desk) -> None:
    rank = desk.trainer()
    assert rank.last(m.Members).replicas == []
    desk.worker("a", 0, 2)
    half = rank.last(m.Members).replicas[0]
    assert (half.replica, half.size, half.members, half.ready) == ("a", 2, [0], False)
    assert half.reason == "waits for member 1 of 2"
    second = desk.worker("a", 1, 2)
    assert rank.last(m.Members).replicas[0].ready is True
    second.leave()
    assert rank.last(m.Members).replicas[0].members == [0]


def test_a_replica_is_current_only_at_what_all_its_members_are_at(desk: Desk) -> None:
    rank = desk.trainer()
    first = desk.worker("a", 0, 2, version=3)
    assert rank.last(m.Members).replicas[0].current == 0
    second = desk.worker("a", 1, 2, version=3)
    assert rank.last(m.Members).replicas[0].current == 3
    second.version = 4
    second.hello()
    state = rank.last(m.Members).replicas[0]
    assert (state.current, state.torn) == (0, True)
    first.version = 4
    first.hello()
    assert rank.last(m.Members).replicas[0].current == 4


def test_a_worker_that_says_it_is_torn_makes_its_replica_torn(desk: Desk) -> None:
    rank = desk.trainer()
    member = desk.worker("a", version=3)
    member.torn = True
    member.hello()
    state = rank.last(m.Members).replicas[0]
    assert (state.current, state.torn) == (0, True)
