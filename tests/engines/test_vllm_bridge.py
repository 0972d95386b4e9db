"""A bridge leads servers through rounds: what they are told, and what becomes of one that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import count

import pytest
import torch

from tensorlease.agents import RoundResult, TrainerAgent
from tensorlease.agents.loading import UNTOUCHED
from tensorlease.engines import vllm_bridge
from tensorlease.engines.member import Tensors
from tensorlease.engines.vllm_bridge import VLLMBridge
from tensorlease.engines.vllm_server import VLLMServer
from tensorlease.protocol.records import Fate, Outcome

from ..broker.raw_agents import eventually
from .conftest import Led, left
from .fake_vllm import FakeVLLM
from .sources import Source, at

UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


def leader_knows(server: FakeVLLM) -> bool:
    """Whether who leads it has heard that there is no round any more."""
    worker = server.leader._worker
    return worker is not None and not worker.goes_on


def test_a_server_is_paused_updated_and_goes_on_with_the_rounds_version(
    source: Source, led: Led
) -> None:
    server = led("a", world_size=2)
    for version in (1, 2):
        server.calls.clear()
        result = source.publish(version)
        assert result.ok, result
        assert set(result.receivers) == {"a/0", "a/1", "a/2"}
        assert [call for call in server.calls if "/init" not in call] == UPDATE
        assert at(server, version)


def test_the_end_of_an_update_is_asked_for_before_its_answer_has_come(
    source: Source, led: Led
) -> None:
    server = led("a", world_size=2)
    assert source.publish(1).ok
    gate = server.hold_answer("/update_weights")
    results: list[RoundResult] = []
    publishing = threading.Thread(target=lambda: results.append(source.publish(2)))
    publishing.start()
    assert gate.came.wait(20.0)
    eventually(lambda: server.answered.count("/finish_weight_update") == 2)
    assert not results
    gate.go.set()
    publishing.join()
    assert results[0].ok
    assert at(server, 2)


def test_in_a_round_of_some_tensors_it_is_asked_for_once_the_update_is_answered(
    source: Source, led: Led
) -> None:
    server = led("a")
    assert source.publish(1).ok
    gate = server.hold_answer("/update_weights")
    results: list[RoundResult] = []

    def publish() -> None:
        source.write(2)
        results.append(source.trainer.publish(2, subset=["w"], timeout=20.0))

    publishing = threading.Thread(target=publish)
    publishing.start()
    assert gate.came.wait(20.0)
    eventually(lambda: server.members[0].worker.version == 2)
    assert server.calls.count("/finish_weight_update") == 1
    gate.go.set()
    publishing.join()
    assert results[0].ok
    assert at(server, 2)


def test_who_leaves_since_an_update_failed_leaves_nothing_that_is_half_asked_for(
    source: Source, led: Led
) -> None:
    server = led("a")
    assert source.publish(1).ok
    server.fails["/update_weights"] = "engine core died"
    assert not source.publish(2).ok
    # A server that is told to end waits for what it has begun to read.
    eventually(lambda: server.dropped == ["/finish_weight_update"])
    assert source.publish(3).ok
    assert at(server, 3)


def test_requests_under_way_do_not_keep_what_was_worked_out_with_old_weights(
    source: Source, led: Led
) -> None:
    server = led("a")
    server.running = True
    server.calls.clear()
    assert source.publish(1).ok
    assert server.calls.count("/reset_prefix_cache") == 2
    assert not server.running
    assert at(server, 1)


def test_a_server_that_keeps_what_was_worked_out_with_old_weights_is_held(
    source: Source, led: Led
) -> None:
    server = led("a")
    server.keeps_prompts = True
    result = source.publish(1)
    assert not result.ok
    assert "/reset_prefix_cache answered {'success': False}" in result.reason
    assert server.paused
    server.keeps_prompts = False
    assert source.publish(2).ok
    assert at(server, 2)


def test_a_server_may_come_after_the_bridge_and_come_again(source: Source, led: Led) -> None:
    server = led("a", there=False)
    server.start()
    assert source.publish(1).ok
    assert at(server, 1)
    server.die()
    eventually(lambda: "a" not in source.trainer.replicas)
    server.start()
    assert source.publish(2).ok
    assert at(server, 2)


@pytest.mark.parametrize(
    ("path", "fate", "held"),
    [
        ("/pause", Fate.EXPELLED, False),
        ("/start_weight_update", Fate.EXPELLED, False),
        ("/update_weights", Fate.LOST, True),
        ("/finish_weight_update", Fate.TORN, True),
        ("/reset_prefix_cache", Fate.TORN, True),
        ("/resume", Fate.TORN, True),
    ],
)
def test_of_two_servers_one_that_fails_is_named_the_other_goes_on_and_the_next_round_repairs_it(
    source: Source, led: Led, path: str, fate: Fate, held: bool
) -> None:
    good, bad = led("good"), led("bad")
    assert source.publish(1, 2).ok
    bad.fails[path] = "engine core died"
    result = source.publish(2, 2)
    assert result.receivers["good/0"].fate is Fate.COMMITTED
    assert at(good, 2)
    assert result.receivers["bad/0"].fate is fate, result
    assert result.receivers["bad/1"].fate is not Fate.UNKNOWN
    if fate is not Fate.LOST:
        assert f"{bad.url}{path}" in result.receivers["bad/0"].reason
        assert "engine core died" in result.receivers["bad/0"].reason
    eventually(lambda: bad.paused is held)
    assert source.publish(3, 2).ok
    assert at(good, 3)
    assert at(bad, 3)


def test_of_two_servers_one_that_cannot_begin_as_it_comes_again_is_named_and_the_other_goes_on(
    source: Source, led: Led
) -> None:
    good, bad = led("good"), led("bad")
    assert source.publish(1, 2).ok
    path = "/init_weight_transfer_engine"
    bad.die()
    eventually(lambda: "bad" not in source.trainer.replicas)
    bad.always[path] = 500, "engine core died"
    bad.start()
    eventually(lambda: bad.leader.away == f"{bad.url}{path} answered 500: engine core died")
    result = source.publish(2)
    assert result.ok
    assert set(result.replicas) == {"good"}
    assert at(good, 2)
    bad.always.clear()
    assert source.publish(3, 2).ok
    assert bad.leader.away == ""
    assert at(good, 3)
    assert at(bad, 3)


def test_a_worker_that_cannot_load_is_the_reason_and_its_server_is_held_until_the_next_round(
    source: Source, led: Led
) -> None:
    good, bad = led("good"), led("bad", world_size=2)
    bad.load_fails = "no such parameter"
    result = source.publish(1, 2)
    assert result.receivers["good/0"].fate is Fate.COMMITTED
    assert "no such parameter" in result.reason
    assert {result.receivers[f"bad/{member}"].fate for member in range(3)}.isdisjoint(
        {Fate.COMMITTED, Fate.UNKNOWN}
    )
    assert bad.paused
    assert bad.label == "default"
    assert source.publish(2, 2).ok
    assert at(bad, 2)
    assert at(good, 2)


def test_a_server_of_one_worker_that_says_that_nothing_was_written_is_not_held(
    source: Source, led: Led
) -> None:
    one, two = led("one"), led("two", world_size=2)
    assert source.publish(1, 2).ok
    for server in (one, two):
        server.prepare_fails = f"{'x' * 400} is new; {UNTOUCHED}"
    result = source.publish(2, 2)
    assert result.outcome is Outcome.FAILED
    eventually(lambda: not one.paused)
    # Of two workers, one may have written what the other has not.
    assert two.paused
    # A leader that is about to leave, to join again, is in no round: the one after repairs.
    versions = count(3)
    eventually(lambda: source.publish(next(versions), 2, least=2).ok)
    assert not (one.paused or two.paused)
    # It had half of a version before: that is not whole by what has failed now.
    one.load_fails, one.prepare_fails = "out of memory", ""
    for text in ("", UNTOUCHED):
        one.prepare_fails = text
        while one.load_fails or one.prepare_fails:
            assert not source.publish(next(versions), 2, least=2).ok
        assert one.paused
    eventually(lambda: source.publish(next(versions), 2, least=2).ok)
    assert not one.paused


def test_a_server_is_held_though_another_for_which_the_round_failed_says_that_nothing_was_written(
    source: Source, led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = led("one"), led("two")
    assert source.publish(1, 2).ok
    one.loading.clear()  # That it has loaded the first version does not count.
    load = two._load

    def later(tensors: Tensors, weights: dict[str, torch.Tensor]) -> None:
        assert one.loading.wait(10.0)
        load(tensors, weights)

    monkeypatch.setattr(two, "_load", later)
    two.load_fails = f"x is new; {UNTOUCHED}"
    result = source.publish(2, 2, least=2)
    assert result.outcome is Outcome.FAILED
    assert UNTOUCHED in result.reason
    # By then the leaders have heard what the servers say of the update.
    eventually(lambda: "tensorlease-update" not in {t.name for t in threading.enumerate()})
    assert one.paused
    eventually(source.trainer.may_write)
    assert source.publish(3, 2).ok
    assert at(one, 3)


def test_a_round_that_is_void_holds_the_server_and_the_next_one_repairs_it(
    ring_trainer: TrainerAgent, led: Led
) -> None:
    server = led("a")
    ring_trainer.wait_ready(timeout=20.0)
    with left(ring_trainer, 1):
        assert server.loading.wait(10.0)
    eventually(lambda: not server.active)
    assert server.paused
    assert server.label == "default"
    # Nor does a round that fails before anything of it has come let it go on.
    ring_trainer.wait_ready(timeout=20.0)
    gate = server.hold("/start_weight_update")
    with left(ring_trainer, 1):
        assert gate.came.wait(10.0)
    eventually(lambda: leader_knows(server))
    gate.go.set()
    eventually(lambda: server.calls[-1] == "/finish_weight_update" and not server.active)
    ring_trainer.wait_ready(timeout=20.0)
    assert server.paused
    ring_trainer.wait_ready(timeout=20.0)
    ring_trainer.publish_stream(2, [("w", torch.full((3,), 2.0))], timeout=20.0).raise_for_status()
    assert at(server, 2)


def test_a_server_that_dies_in_an_update_is_out_and_current_once_it_has_come_again(
    ring_trainer: TrainerAgent, led: Led
) -> None:
    good, bad = led("good"), led("bad")
    ring_trainer.wait_ready(2, timeout=20.0)
    with ring_trainer.open_round(1, timeout=20.0) as r:
        r.send("w", torch.full((3,), 1.0))
        r.flush()
        assert bad.loading.wait(10.0)
        bad.die()
        eventually(lambda: "bad" not in ring_trainer.replicas)
        r.send("v", torch.ones(3))
    assert r.result is not None
    assert r.result.receivers["good/0"].fate is Fate.COMMITTED
    assert Fate.COMMITTED not in {r.result.receivers[f"bad/{n}"].fate for n in (0, 1)}
    bad.start()
    ring_trainer.wait_ready(2, timeout=20.0)
    ring_trainer.publish_stream(2, [("w", torch.full((3,), 2.0))], timeout=20.0).raise_for_status()
    assert at(good, 2)
    assert at(bad, 2)


@pytest.mark.program
def test_the_command_leads_servers_until_it_is_told_to_end(
    source: Source, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    for server in servers:
        server.start()
    program = [sys.executable, "-P", "-m", "tensorlease.cli", "bridge", "vllm", "--channel=policy"]
    words = ["--mode=plugin", *(f"--url={server.url}" for server in servers)]
    process = subprocess.Popen([*program, f"--endpoint={url}", *words])
    try:
        assert source.publish(1, replicas=2).ok
        assert all(at(server, 1) for server in servers)
        process.terminate()
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.die()
    said = capfd.readouterr().err
    for server in servers:
        assert f"{server.url} has joined policy as {server.url.removeprefix('http://')}" in said
    assert "Traceback" not in said


# ---------------------------------------------------------------- slow servers


def test_a_round_that_fails_while_the_server_is_paused_leaves_it_whole_and_going_on(
    ring_trainer: TrainerAgent, led: Led
) -> None:
    server = led("a")

    for path in ("/pause", "/start_weight_update"):
        ring_trainer.wait_ready(timeout=20.0)
        gate = server.hold(path)
        version = len(server.calls) + 1
        with left(ring_trainer, version):
            assert gate.came.wait(10.0)
        eventually(lambda: leader_knows(server))
        gate.go.set()
        eventually(lambda: server.calls[-1] == "/resume" and not server.paused)
        assert not server.active
        assert "/update_weights" not in server.calls
    ring_trainer.wait_ready(timeout=20.0)
    ring_trainer.publish_stream(99, [("w", torch.full((3,), 99.0))], timeout=20.0)
    assert at(server, 99)


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", "/finish_weight_update"])
def test_what_is_not_answered_in_time_is_named_and_the_next_round_repairs_it(
    source: Source, led: Led, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server = led("a")
    assert source.publish(1).ok
    monkeypatch.setattr(vllm_bridge, "CONTROL_S", 0.5)
    gate = server.hold(path)
    before = server.answered.count(path)
    result = source.publish(2)
    assert not result.ok
    assert f"{path}" in result.reason and "has not answered in 0.5 s" in result.reason
    assert server.paused or path == "/pause"
    gate.go.set()  # It is done all the same, later: an engine does one thing after the other.
    eventually(lambda: server.answered.count(path) > before)
    monkeypatch.setattr(vllm_bridge, "CONTROL_S", 20.0)
    assert source.publish(3).ok
    assert at(server, 3)


def test_a_bridge_ends_soon_though_its_server_answers_nothing(
    source: Source, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeVLLM()
    server.start()
    bridge = VLLMBridge(VLLMServer(server.url), "policy", "a", endpoint=url)
    thread = threading.Thread(target=bridge.run)
    thread.start()
    gate = server.hold("/update_weights")
    try:
        source.trainer.wait_ready(timeout=20.0)
        handle = source.trainer.publish_nowait(1)
        assert gate.came.wait(10.0)
        bridge.stop()
        source.trainer.void(handle)
        thread.join(20.0)
        assert not thread.is_alive()
    finally:
        gate.go.set()
        server.die()
