"""Stock servers take versions through a bridge: what they are told, and what becomes of failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorlease.engines import vllm_bridge
from tensorlease.engines.vllm_ipc_bridge import VLLMIpcBridge
from tensorlease.engines.vllm_server import VLLMServer
from tensorlease.protocol.errors import ConfigError, DeadlineError
from tensorlease.protocol.records import Fate

from ..agents.fake_cuda import UUIDS
from ..broker.raw_agents import Threaded, eventually
from .conftest import StockLed, left
from .fake_stock_vllm import FakeStockVLLM, Segments
from .sources import WEIGHTS, StockSource, stock_at

UNPACKED = [
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/resume",
]
PACKED = [
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.fixture
def led(stock_led: StockLed) -> StockLed:
    return stock_led


@pytest.fixture
def source(stock_source: StockSource) -> StockSource:
    return stock_source


def test_a_stock_server_has_the_version_with_name_and_cache_and_goes_on(
    source: StockSource, led: StockLed, way: str
) -> None:
    server = led("a", packed=way != "unpacked")
    eventually(lambda: "/init_weight_transfer_engine" in server.calls)
    for version in (1, 2):
        server.calls.clear()
        result = source.publish(version)
        assert result.ok, result
        assert set(result.receivers) == {"a/0"}
        assert list(dict.fromkeys(server.calls)) == (UNPACKED if way == "unpacked" else PACKED)
        assert stock_at(server, version)


def test_memory_may_be_written_as_soon_as_it_is_released(
    source: StockSource, led: StockLed
) -> None:
    # Unpacked, a stock server reads some of it at the end of the update only.
    server = led("a")
    source.trainer.wait_ready(timeout=20.0)
    source.weights["w"].fill_(1.0)
    handle = source.trainer.publish_nowait(1)
    handle.released.wait(20.0)
    source.weights["w"].fill_(-1.0)
    assert handle.finished.wait(20.0).ok
    assert server.weights[0]["w"].eq(1.0).all()


@pytest.mark.parametrize("most", [1, 64, 2**20])
def test_packed_calls_have_no_more_bytes_than_they_may_or_one_tensor(
    url: str, led: StockLed, segments: Segments, most: int
) -> None:
    server = led("a", packed=True, most=most)
    source = StockSource(url)
    try:
        assert source.publish(1).ok
    finally:
        source.trainer.close(0.5)
    assert stock_at(server, 1)
    for body in server.bodies:
        sizes = body["update_info"]["tensor_sizes"]
        assert sum(sizes) <= most or sum(size > 0 for size in sizes) == 1


def test_a_ring_of_one_slot_is_looked_at_anew_in_each_call(
    url: str, led: StockLed, segments: Segments
) -> None:
    # vLLM keeps the buffer of its last call mapped, and would not wait for the event again.
    server = led("a", packed=True)
    source = StockSource(url, ring=True, slots=1)
    try:
        source.trainer.wait_ready(timeout=20.0)
        with source.trainer.open_round(1, timeout=20.0) as r:
            for name, tensor in WEIGHTS.items():
                r.send(name, torch.full_like(tensor, 1.0))
                r.flush()
    finally:
        source.trainer.close(0.5)
    assert r.result is not None and r.result.ok, r.result
    assert stock_at(server, 1)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("path", "fates", "held"),
    [
        ("/init_weight_transfer_engine", {Fate.EXPELLED}, False),
        ("/pause", {Fate.EXPELLED}, False),
        ("/start_weight_update", {Fate.EXPELLED}, False),
        ("/update_weights", {Fate.EXPELLED}, True),
        ("/finish_weight_update", {Fate.EXPELLED, Fate.TORN}, True),
        ("/update_weight_version", {Fate.TORN}, True),
        ("/reset_prefix_cache", {Fate.TORN}, True),
        ("/resume", {Fate.TORN}, True),
    ],
)
def test_of_two_servers_one_that_fails_is_named_the_other_goes_on_and_the_next_round_repairs_it(
    source: StockSource, led: StockLed, way: str, path: str, fates: set[Fate], held: bool
) -> None:
    if path == "/update_weight_version" and way != "unpacked":
        pytest.skip("packed, the version's name comes with /finish_weight_update")
    good, bad = led("good", packed=way != "unpacked"), led("bad", packed=way != "unpacked")
    assert source.publish(1, 2).ok
    bad.fails[path] = "engine core died"
    result = source.publish(2, 2)
    assert result.receivers["good/0"].fate is Fate.COMMITTED
    assert stock_at(good, 2)
    assert result.receivers["bad/0"].fate in fates, result
    assert f"{bad.url}{path}" in result.receivers["bad/0"].reason
    assert "engine core died" in result.receivers["bad/0"].reason
    eventually(lambda: bad.paused is held)
    assert bad.label == ("2" if path in ("/reset_prefix_cache", "/resume") else "1")
    assert source.publish(3, 2).ok
    assert stock_at(good, 3)
    assert stock_at(bad, 3)


def test_what_a_worker_raises_is_the_reason_and_its_server_is_held(
    source: StockSource, led: StockLed, way: str
) -> None:
    server = led("a", packed=way != "unpacked")
    server.load_fails = "no module or parameter named 'w'"
    result = source.publish(1)
    assert not result.ok
    assert "no module or parameter named 'w'" in result.reason
    eventually(lambda: server.paused)
    assert server.label == "default"
    assert source.publish(2).ok
    assert stock_at(server, 2)


def test_a_server_that_dies_in_an_update_is_out_and_current_once_it_has_come_again(
    source: StockSource, led: StockLed, way: str
) -> None:
    good, bad = led("good", packed=way != "unpacked"), led("bad", packed=way != "unpacked")
    assert source.publish(1, 2).ok
    gate = bad.hold("/update_weights")

    def die() -> None:
        assert gate.came.wait(10.0)
        bad.die()
        gate.go.set()

    killing = threading.Thread(target=die)
    killing.start()
    result = source.publish(2, 2)
    killing.join()
    assert result.receivers["good/0"].fate is Fate.COMMITTED
    assert result.receivers["bad/0"].fate is not Fate.COMMITTED
    assert f"{bad.url}/update_weights" in result.reason
    # Else it might come again before its leader has looked, which would count as ready, and leave
    # before the round is admitted.
    eventually(lambda: not bad.leader.leads)
    bad.start()
    eventually(lambda: bad.leader.leads)
    assert source.publish(3, 2).ok
    assert stock_at(good, 3)
    assert stock_at(bad, 3)


def test_memory_is_kept_while_a_server_that_has_not_answered_may_read_it(
    source: StockSource, led: StockLed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = led("a", update_s=0.3)
    monkeypatch.setattr(vllm_bridge, "CONTROL_S", 0.3)
    source.trainer.wait_ready(timeout=20.0)
    stall = server.stall()
    handle = source.trainer.publish_nowait(1, stage_s=1.0)
    assert stall.came.wait(10.0)
    result = handle.finished.wait(20.0)
    assert not result.ok
    # It was asked whether it is over, and has not answered.
    eventually(lambda: server.calls.count("/finish_weight_update") > 1)
    assert not handle.released.done
    stall.go.set()
    handle.released.wait(20.0)
    monkeypatch.setattr(vllm_bridge, "CONTROL_S", 20.0)
    server.leader._update_s = 20.0
    assert source.publish(2).ok
    assert stock_at(server, 2)


def test_a_bridge_that_has_to_end_while_its_server_may_read_says_no_goodbye(
    source: StockSource,
    led: StockLed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = led("a", update_s=0.3)
    monkeypatch.setattr(vllm_bridge, "CONTROL_S", 0.3)
    source.trainer.wait_ready(timeout=20.0)
    stall = server.stall()
    handle = source.trainer.publish_nowait(1)
    assert stall.came.wait(10.0)
    leader = server.leader
    assert isinstance(leader, VLLMIpcBridge)
    leader.stop()
    eventually(lambda: "is closed while others may read for it" in caplog.text, 30.0)
    (seat,) = leader._seats
    assert seat.holding
    assert not handle.result(20.0).ok
    assert not handle.released.done
    # Its process would end now. That of this test goes on.
    with seat._connection.mutex:
        seat._connection.abandon()
    handle.released.wait(20.0)


def test_a_tensor_that_a_server_does_not_know_is_named_and_may_be_taken_back(
    source: StockSource, led: StockLed
) -> None:
    server = led("a")
    assert source.publish(1).ok
    unknown = source.trainer.register({"no.such": torch.ones(3)})
    server.load_fails = "there is no parameter named 'no.such'"
    result = source.publish(2)
    assert not result.ok
    assert "no.such" in result.reason
    source.trainer.unregister(unknown, timeout=20.0)
    assert source.publish(3).ok
    assert stock_at(server, 3)


def test_an_update_that_another_has_left_open_is_ended_first(
    source: StockSource, led: StockLed
) -> None:
    server = led("a")
    for worker in server.workers:
        worker.active = True
    assert source.publish(1).ok
    assert stock_at(server, 1)


def test_a_round_that_is_void_holds_the_server_and_the_next_one_repairs_it(
    broker: Threaded, url: str, led: StockLed
) -> None:
    server = led("a", packed=True)
    source = StockSource(url, ring=True)
    try:
        source.trainer.wait_ready(timeout=20.0)
        with left(source.trainer, 1):
            assert server.loading.wait(10.0)
        leader = server.leader
        assert isinstance(leader, VLLMIpcBridge)
        eventually(lambda: not leader._seats[0].goes_on)
        assert server.paused
        assert server.label == "default"
        assert source.publish(2).ok
    finally:
        source.trainer.close(0.5)
    assert stock_at(server, 2)


# ---------------------------------------------------------------- what cannot be had


def test_a_ring_without_packed_is_refused_by_name(url: str, led: StockLed) -> None:
    server = led("a")
    source = StockSource(url, ring=True)
    try:
        result = source.publish(1)
    finally:
        source.trainer.close(0.5)
    assert not result.ok
    assert "through a ring" in result.reason and "--packed" in result.reason
    assert "/update_weights" not in server.calls
    eventually(lambda: server.calls[-2:] == ["/finish_weight_update", "/resume"])
    assert not server.paused and not server.active


def test_a_ring_in_shared_memory_is_refused_by_name_and_the_server_goes_on(
    broker: Threaded, url: str
) -> None:
    server = FakeStockVLLM(Segments())
    server.start()
    bridge = VLLMIpcBridge(VLLMServer(server.url), "policy", "a", endpoint=url, packed=True)
    thread = threading.Thread(target=bridge.run)
    thread.start()
    source = StockSource(url, ring=True)
    try:
        for version in (1, 2):
            result = source.publish(version)
            assert "shared memory" in result.reason and "--device cuda:0" in result.reason
            eventually(lambda: server.calls[-1] == "/resume" and not server.paused)
            assert not server.active
            assert "/update_weights" not in server.calls
    finally:
        source.trainer.close(0.5)
        bridge.stop()
        thread.join(20.0)
        server.die()
    assert not thread.is_alive()


@pytest.mark.parametrize("options", [{"verify": True}, {"subset": ["w"], "base": 1}])
def test_rounds_that_need_our_backend_leave_the_server_alone(
    source: StockSource, led: StockLed, options: dict[str, object]
) -> None:
    server = led("a")
    assert source.publish(1).ok
    server.calls.clear()
    source.trainer.wait_ready(timeout=20.0)
    result = source.trainer.publish(2, timeout=20.0, **options)  # type: ignore[arg-type]
    assert not result.ok
    assert "stock server" in result.reason and "--mode plugin" in result.reason
    assert not server.calls
    assert source.publish(3).ok
    assert stock_at(server, 3)


def test_shared_memory_is_refused_before_any_round(broker: Threaded, url: str) -> None:
    segments = Segments()
    server = FakeStockVLLM(segments)
    server.start()
    bridge = VLLMIpcBridge(VLLMServer(server.url), "policy", "a", endpoint=url)
    thread = threading.Thread(target=bridge.run)
    thread.start()
    source = StockSource(url)
    try:
        eventually(lambda: "a" in source.trainer.replicas)
        with pytest.raises(DeadlineError, match="shared memory.*of GPUs alone"):
            source.trainer.wait_ready(timeout=1.0)
    finally:
        source.trainer.close(0.5)
        bridge.stop()
        thread.join(20.0)
        server.die()
    assert not thread.is_alive()


def test_a_server_with_more_workers_than_gpus_are_named_ends_the_bridge(
    broker: Threaded, url: str, segments: Segments
) -> None:
    server = FakeStockVLLM(segments, UUIDS[:2])
    server.start()
    bridge = VLLMIpcBridge(VLLMServer(server.url), "policy", "a", endpoint=url)
    try:
        with pytest.raises(
            ConfigError, match=r"has 2 workers, and 1 GPUs are named.*--device UUID"
        ):
            bridge.run()
    finally:
        server.die()


# ---------------------------------------------------------------- several GPUs


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_each_worker_of_a_server_gets_what_lies_on_its_gpu(
    url: str, led: StockLed, segments: Segments, ring: bool, experts: bool
) -> None:
    server = led("a", packed=ring, gpus=UUIDS[:2], devices=UUIDS[:2])
    own = ["expert.0", "expert.1"] if experts else ["", ""]
    made = [StockSource.beside(url, segments, rank, ring=ring, own=own[rank]) for rank in (0, 1)]
    try:
        for version in (1, 2):
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(StockSource.publish, made, [version] * 2))
            assert [result.ok for result in results] == [True, True], results
            assert set(results[0].receivers) == {"a/0", "a/1"}
            if experts:
                for place, weights in enumerate(server.weights):
                    assert weights.pop(own[place]).eq(float(version)).all()
                    assert not weights.keys() - WEIGHTS.keys()
            assert stock_at(server, version)
    finally:
        for source in made:
            source.trainer.close(0.5)
    # One entry a worker where they get different things, else one for all.
    kinds = {type(body["update_info"]) for body in server.bodies}
    assert (list in kinds) is experts


@pytest.mark.parametrize("ring", [False, True])
def test_ranks_that_send_in_different_steps_are_named(
    url: str, led: StockLed, segments: Segments, ring: bool
) -> None:
    led("a", packed=True, most=1, gpus=UUIDS[:2], devices=UUIDS[:2])
    made = [
        StockSource.beside(url, segments, rank, ring=ring, own="more" if rank else "")
        for rank in (0, 1)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda source: source.publish(1), made))
    finally:
        for source in made:
            source.trainer.close(0.5)
    assert not results[0].ok
    assert "would need 4, 5 calls" in results[0].reason


# ---------------------------------------------------------------- the command


@pytest.mark.program
@pytest.mark.parametrize("packed", [False, True])
def test_the_command_leads_stock_servers_until_it_is_told_to_end(
    source: StockSource,
    url: str,
    segments: Segments,
    capfd: pytest.CaptureFixture[str],
    packed: bool,
) -> None:
    servers = [FakeStockVLLM(segments), FakeStockVLLM(segments)]
    for server in servers:
        server.start()
    program = [sys.executable, "-P", "-m", "tensorlease.cli", "bridge", "vllm", "--channel=policy"]
    words = ["--packed", "--packed-buffer-size-bytes=4096"] if packed else []
    words += [f"--url={server.url}" for server in servers]
    process = subprocess.Popen([*program, f"--endpoint={url}", *words])
    try:
        assert source.publish(1, replicas=2).ok
        assert all(stock_at(server, 1) for server in servers)
        process.terminate()
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.die()
    said = capfd.readouterr().err
    assert "cannot be seen from here" in said
    assert "Traceback" not in said
