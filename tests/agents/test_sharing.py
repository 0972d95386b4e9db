"""How tensors of a GPU are handed over: what may be chosen, what is tried, and where it is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch

from tensorlease.agents import (
    ConfigError,
    GpuMemoryError,
    NotSharedError,
    RingOptions,
    Share,
    TrainerAgent,
)
from tensorlease.agents import registry as registries
from tensorlease.agents.registry import Registry
from tensorlease.agents.sharing import ways_of
from tensorlease.agents.source import RegisteredBuffers
from tensorlease.protocol import messages as m
from tensorlease.protocol.codec import decode_from_agent, encode

from ..broker.raw_agents import Threaded
from ..command_lines import command
from .conftest import StartWorker

IPC, STAGING, SHM = Share.IPC, Share.STAGING, Share.SHM


@pytest.mark.parametrize(
    ("share", "copies", "tried"),
    [
        (None, False, [IPC]),
        (None, True, [SHM]),
        ("ipc", False, [IPC]),
        (Share.STAGING, False, [STAGING]),
        ("staging", True, [STAGING]),
        ("shm", False, [SHM]),
        ("auto", False, [IPC, STAGING, SHM]),
        ("auto", True, [STAGING, SHM]),
    ],
)
def test_what_is_chosen_is_tried_in_this_order(
    share: Share | str | None, copies: bool, tried: list[Share]
) -> None:
    assert ways_of(share, copies) == tried


@pytest.mark.parametrize(
    ("share", "copies", "text"),
    [
        ("stagin", False, "share='stagin': must be one of auto, ipc, staging, shm, 'staging' say"),
        ("ipc", True, "share='ipc' hands tensors over where they are, and dtype= and shadow=True"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_before_a_broker_is_looked_for(
    share: str, copies: bool, text: str
) -> None:
    trainer = TrainerAgent("policy", endpoint="ipc:///nowhere/at/all.sock", connect_timeout=0.0)
    with trainer, pytest.raises(ConfigError) as error:
        trainer.register({"w": torch.ones(3)}, shadow=copies, share=share)
    assert text in str(error.value)


def of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, fails: dict[Share, Callable[[], Exception]]
) -> list[Share]:
    """Tensors are taken for those of a GPU; by these ways they cannot go. Returns what is tried."""
    tried: list[Share] = []
    real = Registry._by

    def by(self: Registry, way: Share, *arguments: object) -> RegisteredBuffers:
        tried.append(way)
        if way in fails:
            raise fails[way]()
        return real(self, SHM, *arguments)  # type: ignore[arg-type]

    def any_of_gpu(_: Iterable[object]) -> bool:
        return True

    monkeypatch.setattr(Registry, "_by", by)
    monkeypatch.setattr(registries, "_any_of_gpu", any_of_gpu)
    return tried


def not_shared() -> NotSharedError:
    return NotSharedError("w", "lies in GPU memory that CUDA IPC cannot share: it is so")


def no_room() -> GpuMemoryError:
    return GpuMemoryError("tensor 'w': no room for staging")


def test_auto_takes_the_first_way_that_works_and_logs_one_line_with_the_reasons(
    broker: Threaded,
    url: str,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = of_a_gpu(monkeypatch, {IPC: not_shared, STAGING: no_room})
    held = {"w": torch.zeros(5)}
    start_worker("a", held)
    sent = {"w": torch.ones(5)}
    with TrainerAgent("policy", endpoint=url) as trainer:
        with caplog.at_level(logging.WARNING, logger="tensorlease.agents"):
            buffers = trainer.register(sent, share="auto")
        assert tried == [IPC, STAGING, SHM] and buffers.via == ("shm",)
        (line,) = [r.getMessage() for r in caplog.records if "share=" in r.getMessage()]
        assert line.startswith("tensors of a GPU go by shm")
        assert "it is so" in line and "no room for staging" in line
        trainer.wait_ready(1, 20.0)
        for version in (1, 2):
            sent["w"].fill_(version)
            result = trainer.publish(version).raise_for_status()
            assert held["w"].tolist() == [version] * 5
            assert result.via == {0: ("shm",)}


@pytest.mark.parametrize("share", [None, "ipc", "staging"])
def test_without_auto_the_way_that_does_not_work_is_an_error_and_no_other_is_tried(
    broker: Threaded, url: str, monkeypatch: pytest.MonkeyPatch, share: str | None
) -> None:
    tried = of_a_gpu(monkeypatch, {IPC: not_shared, STAGING: no_room})
    error = GpuMemoryError if share == "staging" else NotSharedError
    with TrainerAgent("policy", endpoint=url) as trainer:
        with pytest.raises(error):
            trainer.register({"w": torch.ones(5)}, share=share)
        assert len(tried) == 1 and trainer._registry.numbers == []


def test_what_is_on_the_cpu_is_moved_whatever_was_chosen_for_a_gpu(
    broker: Threaded, url: str
) -> None:
    with TrainerAgent("policy", endpoint=url) as trainer:
        for share in Share:
            sent = torch.ones(5)
            buffers = trainer.register({share.value: sent}, share=share)
            assert not buffers.shadows and buffers.via == ("shm",)


def shown_via(url: str) -> list[str]:
    """What the status says of the one trainer."""
    done = command("status", "--json", "--endpoint", url)
    (channel,) = msgspec.json.decode(done.out)["channels"]
    assert channel["replicas"][0]["members"][0]["via"] == []
    (rank,) = channel["group"]["ranks"]
    found: list[str] = rank["via"]
    return found


def test_result_and_status_say_how_the_bytes_of_each_trainer_travel(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    held = {"w": torch.zeros(5), "r": torch.zeros(2)}
    start_worker("a", held, strict=False)
    ring = RingOptions(2, 65536)
    with TrainerAgent("policy", endpoint=url, ring=ring) as trainer:
        trainer.register({"w": torch.ones(5)})
        trainer.wait_ready(1, 20.0)
        # As a trainer with tensors of a GPU says it.
        (number,) = trainer._registry.numbers
        assert shown_via(url) == ["shm"]  # By what it has offered, before any round.
        trainer._core.via[number] = "staging"
        trainer._core._last_via = ([], [])
        assert trainer.publish(1).raise_for_status().via == {0: ("staging",)}
        snapshot = trainer.publish_nowait(2, snapshot=True).result(20.0).raise_for_status()
        assert snapshot.via == {0: ("shm",)}
        assert trainer.publish(3).raise_for_status().via == {0: ("staging",)}
        assert shown_via(url) == ["shm", "staging"]
        shown = command("status", "--endpoint", url).out
        head, row = next(
            (before, line)
            for before, line in zip(shown.splitlines(), shown.splitlines()[1:], strict=False)
            if line.startswith("trainer rank 0")
        )
        assert row[head.index("via") :].startswith("shm, staging")


def test_what_a_hello_announces_of_a_batch_has_how_it_travels(
    broker: Threaded, url: str, start_worker: StartWorker
) -> None:
    start_worker("a", {"w": torch.zeros(5)})
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register({"w": torch.ones(5)})
        trainer.wait_ready(1, 20.0)
        trainer.publish(1).raise_for_status()
        (call,) = trainer._core.state.calls.values()
        assert [lease.via for lease in trainer._core._announce(call).leases] == [["shm"]]


def test_what_an_older_trainer_leaves_out_is_no_way_and_no_error() -> None:
    whole = msgspec.msgpack.decode(encode(m.Offer(1, 0, [7], 64, ["ipc"])))
    assert whole[-1] == ["ipc"]
    shorter = msgspec.msgpack.encode(whole[:-1])
    assert decode_from_agent(shorter) == m.Offer(1, 0, [7], 64, [])
