"""Tensors that go through a ring again: what was found out about them is used only while it is true."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import RingOptions, TrainerAgent, placement, ring_round
from tensorlease.agents.ring_script import Script, layout_of

from ..broker.raw_agents import Threaded
from .rings import SLOT, Start, same

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

Change = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]


@pytest.fixture
def ring(broker: Threaded, url: str) -> Iterator[TrainerAgent]:
    agent = TrainerAgent("policy", endpoint=url, ring=RingOptions(3, SLOT))
    yield agent
    agent.close(timeout=0.5)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that went by a script."""
    found: list[int] = []
    send = Script.send

    def noted(self: Script, rnd: Any) -> None:
        found.append(rnd.version)
        send(self, rnd)

    monkeypatch.setattr(Script, "send", noted)
    return found


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors that were looked at one by one."""
    found: list[str] = []
    place_one = placement.place_one

    def noted(name: str, *args: Any) -> Any:
        found.append(name)
        return place_one(name, *args)

    monkeypatch.setattr(ring_round, "place_one", noted)
    return found


def weights() -> dict[str, Tensor]:
    """Small ones, one that fills more than a slot, and one of each other kind of dtype."""
    made = {f"w{i}": torch.rand(SLOT // 16 + i) for i in range(12)}
    made["large"] = torch.rand(3, SLOT // 4 - 7)
    made["half"] = torch.rand(100).bfloat16()
    made["whole"] = torch.arange(1000)
    return made


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


def test_a_dictionary_that_lies_where_it_lay_goes_by_a_script_with_its_present_values(
    ring: TrainerAgent, start_worker: Start, scripts: list[int], looked_at: list[str]
) -> None:
    sent = weights()
    target = like(sent)
    start_worker("r", target)
    for version in range(1, 7):
        for tensor in sent.values():
            tensor.add_(1)
        assert ring.publish_stream(version, sent, timeout=20.0).ok
        assert same(target, sent)
    assert scripts == [3, 4, 5, 6]
    assert looked_at == [*sent, "w0"]  # The first one opens the round.


def replaced(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    return sent | {"w3": sent["w3"] * 2}


def other_order(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(reversed(sent.items()))


def transposed(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """At the same address, of the same type and shape: only its strides differ."""
    square = sent["square"]
    return sent | {"square": square.t()}


def data_replaced(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    sent["w1"].data = sent["w1"] * 3
    return sent


@pytest.mark.parametrize("change", [replaced, other_order, transposed, data_replaced])
def test_what_does_not_lie_so_any_more_is_looked_at_again(
    ring: TrainerAgent, start_worker: Start, scripts: list[int], change: Change
) -> None:
    sent = weights() | {"square": torch.rand(9, 9)}
    target = like(sent)
    start_worker("r", target)
    for version in (1, 2, 3):
        assert ring.publish_stream(version, sent, timeout=20.0).ok
    assert scripts == [3]
    sent = change(sent)
    for version in (4, 5, 6):
        sent["w0"].add_(1)
        assert ring.publish_stream(version, sent, timeout=20.0).ok
        assert same(target, sent)
    assert 4 not in scripts


def test_a_tensor_whose_storage_has_shrunk_under_it_lies_otherwise() -> None:
    memory = bytearray(16)
    whole = torch.frombuffer(memory, dtype=torch.float32)[:2]
    part = torch.frombuffer(memory, dtype=torch.float32, count=2)
    assert (whole.data_ptr(), whole.shape) == (part.data_ptr(), part.shape)
    assert layout_of({"w": whole}) == layout_of({"w": whole})
    assert layout_of({"w": whole}) != layout_of({"w": part})


def test_a_script_keeps_no_tensor(
    ring: TrainerAgent, start_worker: Start, scripts: list[int]
) -> None:
    sent = weights()
    start_worker("r", like(sent))
    for version in (1, 2, 3):
        assert ring.publish_stream(version, sent, timeout=20.0).ok
    assert scripts == [3]
    left = [weakref.ref(tensor) for tensor in sent.values()]
    sent.clear()
    gc.collect()
    assert not [ref for ref in left if ref() is not None]


def test_some_of_a_round_sent_by_hand_and_then_a_dictionary(
    ring: TrainerAgent, start_worker: Start, scripts: list[int]
) -> None:
    sent = weights()
    target = like(sent)
    start_worker("r", target)
    rest = {name: tensor for name, tensor in sent.items() if name != "w0"}
    for version in (1, 2, 3, 4):
        sent["w0"].add_(1)
        sent["w1"].add_(1)
        with ring.open_round(version, timeout=20.0) as r:
            r.send("w0", sent["w0"])
            r.send_all(rest)
        assert r.result is not None and r.result.ok
        assert same(target, sent)
    assert scripts == []


def test_tensors_made_anew_are_looked_at_once_if_they_are_of_the_same_kind(
    ring: TrainerAgent, start_worker: Start, looked_at: list[str]
) -> None:
    first = weights()
    target = like(first)
    start_worker("r", target)
    sent: dict[str, Tensor] = {}
    for version in (1, 2, 3):
        sent = {name: tensor + version for name, tensor in first.items()}
        made = ((name, tensor.clone()) for name, tensor in sent.items())
        assert ring.publish_stream(version, made, timeout=20.0).ok
        assert same(target, sent)
    assert looked_at == [*first, "w0", "w0"]  # The first one opens the round.
    # Of another layout, of a view that negates, and of a dtype that is converted.
    sent["w2"] = torch.rand(SLOT // 16 + 2, 2)[:, 0]
    sent["w4"] = torch.view_as_real(torch.rand(SLOT // 16 + 4, dtype=torch.complex64))[:, 1]
    looked_at.clear()
    assert ring.publish_stream(4, iter(sent.items()), timeout=20.0).ok
    assert same(target, sent)
    assert looked_at == ["w0", "w2", "w4"]
