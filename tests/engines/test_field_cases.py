"""Reported failures (docs/field-cases.md), as what becomes of whole servers that are led."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tensorlease.agents import RoundResult
from tensorlease.engines import leadership, vllm_bridge
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge
from tensorlease.engines.vllm_server import VLLMServer
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .fake_vllm import FakeVLLM
from .fleets import STOCK, WAYS, Fleet, fleet_of

RELEASES = ("/resume", "/wake_up?tags=kv_cache&tags=scheduling")
"""What lets a server answer requests."""
START, FINISH = "/start_weight_update", "/finish_weight_update"
RESET = "/reset_prefix_cache"


@pytest.fixture(params=WAYS)
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(vllm_bridge, "LOOK_S", 0.1)
    with fleet_of(str(request.param), request) as made:
        yield made


def loaded(call: str) -> bool:
    return call in ("/update_weights", "/finish_weight_update")


# ---------------------------------------------------------------- C61, C62, C76: some fail


def test_what_a_worker_raises_is_said_at_once_and_cut_and_the_others_have_the_version(
    fleet: Fleet,
) -> None:
    good, bad = fleet.start("good"), fleet.start("bad")
    assert fleet.publish(1, 2).ok
    bad.load_fails = "no parameter named 'w': " + "x" * 100_000
    # Far less than the 20 s that an update may take.
    fleet.trainer.wait_ready(2, timeout=20.0)
    result = fleet.publish(2, 2)
    assert result.outcome is Outcome.MIXED
    assert result.seconds < 10.0
    assert fleet.name_of(bad) in result.reason
    assert "no parameter named 'w'" in result.reason
    assert len(result.reason) < 5_000
    of_bad = [r for n, r in result.receivers.items() if n.startswith(f"{fleet.name_of(bad)}/")]
    assert {each.fate for each in of_bad}.isdisjoint({Fate.COMMITTED, Fate.UNKNOWN})
    # Nobody takes it for one that has the version: neither the broker, nor whoever asks it.
    states = {name: state.current for name, state in fleet.trainer.replicas.items()}
    assert states.pop(fleet.name_of(good)) == 2
    assert set(states.values()) <= {0, 1}
    assert fleet.has(good, 2)
    eventually(lambda: bad.paused)
    assert bad.label == "1"
    bad.calls.clear()
    assert fleet.publish(3, 2).ok
    assert fleet.has(good, 3) and fleet.has(bad, 3)
    # Ended once without a version: what its layers have kept of it is not mixed with this one.
    control = [call for call in bad.calls if call in (START, FINISH)]
    # Where the workers have our backend, it gives up what is left of a failed update itself.
    stock = fleet.way in ("unpacked", "packed", "ring")
    assert control[:3] == ([START, FINISH, START] if stock else [START, FINISH])


def test_of_three_servers_one_dies_in_a_round_and_one_between_rounds_and_the_third_goes_on(
    fleet: Fleet,
) -> None:
    first, second, third = (fleet.start(name) for name in "abc")
    assert fleet.publish(1, 3).ok
    gate = first.hold("/update_weights")

    def die() -> None:
        assert gate.came.wait(10.0)
        first.die()
        gate.go.set()

    killing = threading.Thread(target=die)
    killing.start()
    result = fleet.publish(2, 3)
    killing.join()
    assert result.outcome is Outcome.MIXED
    assert fleet.name_of(first) in result.reason
    assert result.replicas[fleet.name_of(first)].fate is not Fate.COMMITTED
    assert fleet.has(second, 2) and fleet.has(third, 2)
    second.die()
    gone = {fleet.name_of(first), fleet.name_of(second)}
    eventually(lambda: gone.isdisjoint(fleet.trainer.replicas))
    result = fleet.publish(3)
    assert result.ok
    assert list(result.replicas) == [fleet.name_of(third)]
    assert fleet.has(third, 3)


def test_in_a_strict_round_one_that_fails_lets_no_server_answer_by_the_new_version(
    fleet: Fleet,
) -> None:
    if fleet.way == "ring":
        pytest.skip("a ring's rounds are strict by their stragglers")
    good, bad = fleet.start("good"), fleet.start("bad")
    assert fleet.publish(1, 2).ok
    bad.fails["/pause"] = bad.fails["/sleep"] = "engine core died"
    fleet.trainer.wait_ready(2, timeout=20.0)
    result = fleet.trainer.publish(2, timeout=30.0, strict=True)
    assert result.outcome is Outcome.FAILED
    assert "engine core died" in result.reason
    assert Fate.COMMITTED not in {each.fate for each in result.replicas.values()}
    # Each is held with what it has of it, or has nothing of it and goes on.
    eventually(lambda: good.paused or not good.active)
    assert good.label == bad.label == "1"
    assert not bad.paused and not bad.active
    bad.fails.clear()
    assert fleet.publish(3, 2).ok
    assert fleet.has(good, 3) and fleet.has(bad, 3)


# ---------------------------------------------------------------- C64, C74: one comes again


def test_a_server_that_has_come_again_is_at_no_version_until_its_own_round(fleet: Fleet) -> None:
    stays, again = fleet.start("stays"), fleet.start("again")
    assert fleet.publish(1, 2).ok
    state = fleet.state_of(again)
    assert state is not None and state.current == 1
    again.die()
    eventually(lambda: fleet.name_of(again) not in fleet.trainer.replicas)
    again.start()
    eventually(lambda: (state := fleet.state_of(again)) is not None and state.ready)
    state = fleet.state_of(again)
    assert state is not None and state.current == 0
    assert again.label == "default"
    assert not fleet.has(again, 1)
    # The one that stays is no worse for it.
    assert fleet.has(stays, 1)
    result = fleet.publish(2, 2)
    assert result.ok and set(result.replicas) == {fleet.name_of(stays), fleet.name_of(again)}
    assert fleet.has(stays, 2) and fleet.has(again, 2)


def test_while_the_trainers_weights_stay_as_they_are_a_server_that_comes_again_is_served(
    fleet: Fleet,
) -> None:
    if fleet.way == "ring":
        pytest.skip("a ring has no weights that stay")
    stays, again = fleet.start("stays"), fleet.start("again")
    assert fleet.publish(1, 2).ok
    again.die()
    eventually(lambda: fleet.name_of(again) not in fleet.trainer.replicas)
    stays.calls.clear()
    with fleet.trainer.unchanged() as span:
        again.start()
        eventually(lambda: fleet.has(again, 1), 30.0)
        eventually(lambda: span.results)
        served = {name for result in span.results for name in result.receivers}
        assert {name.rpartition("/")[0] for name in served} == {fleet.name_of(again)}
        assert {result.version for result in span.results} == {1}
    # Who had it is not held again.
    assert stays.calls == []
    assert fleet.has(stays, 1)


def test_a_server_that_comes_in_the_middle_of_a_round_is_wholly_out_of_it(fleet: Fleet) -> None:
    first, late = fleet.start("first"), fleet.start("late")
    late.die()
    gate = first.hold("/start_weight_update")
    results: list[RoundResult] = []
    publishing = threading.Thread(target=lambda: results.append(fleet.publish(1)))
    publishing.start()
    try:
        assert gate.came.wait(20.0)
        late.start()
        eventually(lambda: (state := fleet.state_of(late)) is not None and state.ready)
        late.calls.clear()
    finally:
        gate.go.set()
        publishing.join()
    (result,) = results
    assert list(result.replicas) == [fleet.name_of(first)]
    assert fleet.has(first, 1)
    assert late.calls == [] and late.label == "default"
    assert fleet.publish(2, 2).ok
    assert fleet.has(first, 2) and fleet.has(late, 2)


# ---------------------------------------------------------------- C73: the prefix cache


def test_the_prefix_cache_is_reset_between_the_weights_and_the_first_request_in_each_round(
    fleet: Fleet,
) -> None:
    server = fleet.start("a")
    assert fleet.publish(1).ok
    # Rounds that work, and the first ones after each kind of failure.
    for version, path in enumerate(["", "/update_weights", "/finish_weight_update", RESET], 1):
        if path:
            server.fails[path] = "engine core died"
            assert not fleet.publish(2 * version).ok
            eventually(lambda: server.paused)
        server.calls.clear()
        assert fleet.publish(2 * version + 1).ok
        assert fleet.has(server, 2 * version + 1)
        after = [call for call in server.calls if loaded(call) or call in (RESET, *RELEASES)]
        last_loaded = max(place for place, call in enumerate(after) if loaded(call))
        assert [call for call in after[last_loaded + 1 :] if call == RESET], server.calls
        released = [place for place, call in enumerate(after) if call in RELEASES]
        assert len(released) == 1 and after[released[0] - 1] == RESET, server.calls


# ---------------------------------------------------------------- C80, C81: what is said is so


def test_values_that_come_again_are_what_each_server_has(fleet: Fleet) -> None:
    server = fleet.start("a")
    for version, value in ((1, 1), (2, 2), (3, 1), (4, 1)):
        assert fleet.publish(version, value=value).ok
        assert fleet.has(server, version, value)


def test_the_version_is_the_same_on_all_sides_in_each_way_also_after_a_repair(
    fleet: Fleet,
) -> None:
    server = fleet.start("a")

    def said() -> tuple[object, ...]:
        state = fleet.state_of(server)
        assert state is not None
        return fleet.trainer.last_version, state.current, server.label

    for version in (3, 4):
        assert fleet.publish(version).ok
        assert said() == (version, version, str(version))
    server.load_fails = "no such parameter"
    assert not fleet.publish(5).ok
    assert server.label == "4"
    assert fleet.publish(7).ok
    assert said() == (7, 7, "7")
    assert type(fleet.trainer.last_version) is int


# ---------------------------------------------------------------- C69: two leaders


def test_a_second_leader_is_refused_by_name_and_does_not_break_the_round_under_way(
    fleet: Fleet, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fleet.start("a")
    name = fleet.name_of(server)
    assert fleet.publish(1).ok
    monkeypatch.setattr(leadership, "WAIT_S", 0.2)
    gate = server.hold("/start_weight_update")
    results: list[RoundResult] = []
    publishing = threading.Thread(target=lambda: results.append(fleet.publish(2)))
    publishing.start()
    try:
        assert gate.came.wait(20.0)
        with pytest.raises(ConfigError, match=r"is led by \S.* already"):
            second_leader(fleet, server, name, url).run()
    finally:
        gate.go.set()
        publishing.join()
    assert results[0].ok, results
    assert fleet.has(server, 2)
    assert fleet.publish(3).ok
    assert fleet.has(server, 3)


def second_leader(fleet: Fleet, server: FakeVLLM, name: str, url: str) -> VLLMBridge:
    """Returns another that would lead the server, in the other mode of calls if there are two."""
    there = VLLMServer(server.url)
    if fleet.way in STOCK:
        packed = fleet.way == "unpacked"
        return VLLMIpcBridge(there, "policy", name, endpoint=url, packed=packed)
    return VLLMBridge(there, "policy", name, endpoint=url)


def test_an_update_that_another_has_left_open_is_ended_first(fleet: Fleet) -> None:
    server = fleet.start("a")
    assert fleet.publish(1).ok
    for worker in getattr(server, "workers", ()):
        worker.active = True
    server.active = True
    assert fleet.publish(2).ok
    assert fleet.has(server, 2)
