"""What a plan keeps between rounds: only for as long as everything lies where it lay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorlease.agents import copy_plan
from tensorlease.agents.copy_plan import CopyPlan
from tensorlease.agents.errors import AttachError, MappingError
from tensorlease.agents.memory import MappedMemory
from tensorlease.agents.pieces import RowBlocks
from tensorlease.agents.shm import ShmMapping
from tensorlease.agents.sink import AttachedTensors
from tensorlease.agents.source import RegisteredBuffers
from tensorlease.protocol.handles import ShmHandle

from .exports import Export


@pytest.fixture(name="prepared")
def _prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The buffers of each time that the work was worked out."""
    seen: list[tuple[int, ...]] = []
    prepare = CopyPlan._prepare

    def noted(self: CopyPlan, source: str, taken: tuple[int, ...], *where: Any) -> object:
        seen.append(taken)
        return prepare(self, source, taken, *where)

    monkeypatch.setattr(CopyPlan, "_prepare", noted)
    return seen


class Mapped:
    """The mappings of a worker; to be closed when no tensor looks into them."""

    def __init__(self, directory: Path, registered: RegisteredBuffers) -> None:
        self.memory: dict[int, ShmMapping] = {}
        for buffer in registered.buffers:
            if isinstance(buffer.handle, ShmHandle):
                self.memory[buffer.number] = ShmMapping(directory, buffer.handle)

    def copy(self, plan: CopyPlan, *numbers: int) -> int:
        """Copies from these buffers, or all; returns the bytes."""
        mapped: Mapping[int, MappedMemory] = self.memory
        return plan.copy("t", numbers or list(mapped), mapped).nbytes

    def close(self) -> None:
        for memory in self.memory.values():
            memory.unmap()


def test_rounds_of_the_same_buffers_are_worked_out_once(
    directory: Path, export: Export, prepared: list[tuple[int, ...]]
) -> None:
    source, target = torch.zeros(100), torch.zeros(100)
    strided = torch.zeros(20, 2)
    first, second = export({"w": source}), export({"v": torch.arange(20.0)})
    plan = AttachedTensors({"w": target, "v": strided[:, 0]}).plan(
        {"t": [*first.buffers, *second.buffers]}
    )
    mapped, other = Mapped(directory, first), Mapped(directory, second)
    mapped.memory.update(other.memory)
    for version in range(3):
        source.fill_(version)
        strided.zero_()
        assert mapped.copy(plan) == 480
        assert target.eq(version).all()
        assert strided[:, 0].tolist() == list(range(20))
    assert len(prepared) == 1
    source.fill_(9)
    assert mapped.copy(plan, *first.numbers) == 400
    assert target.eq(9).all()
    assert len(prepared) == 2
    mapped.close()


def test_a_tensor_that_was_given_other_memory_is_written_there(
    directory: Path, export: Export, prepared: list[tuple[int, ...]]
) -> None:
    source = torch.ones(4, 4)
    layer = nn.Linear(4, 4, bias=False)
    registered = export({"w": source})
    plan = AttachedTensors({"w": layer.weight}).plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    mapped.copy(plan)
    former = layer.weight.data
    layer.weight.data = torch.zeros(4, 4)
    source.fill_(2)
    mapped.copy(plan)
    assert layer.weight.eq(2).all()
    assert former.eq(1).all()
    layer.weight.data = former  # Back again: what was kept first does not count any more.
    source.fill_(3)
    mapped.copy(plan)
    assert former.eq(3).all()
    assert len(prepared) == 3
    mapped.close()


def test_a_tensor_of_other_form_at_the_same_place_is_refused(
    directory: Path, export: Export
) -> None:
    registered = export({"w": torch.ones(4, 4)})
    layer = nn.Linear(4, 4, bias=False)
    plan = AttachedTensors({"w": layer.weight}).plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    mapped.copy(plan)
    good = layer.weight.data
    for other in (good.view(2, 8), good.t(), good.view(torch.int32).view(torch.float32)[:2]):
        layer.weight.data = other
        with pytest.raises(AttachError, match="'w' was replaced since it was attached"):
            mapped.copy(plan)
    layer.weight.requires_grad_(False).data = torch.ops.aten._neg_view(good)
    with pytest.raises(AttachError, match="'w' was replaced .*, conjugated or negated lazily"):
        mapped.copy(plan)
    layer.weight.data = good
    good.untyped_storage().resize_(60)
    with pytest.raises(AttachError, match="'w' has lost its memory"):
        mapped.copy(plan)
    mapped.close()


def test_a_mapping_that_was_made_anew_is_read_where_it_is(
    directory: Path, export: Export, prepared: list[tuple[int, ...]]
) -> None:
    source, target = torch.ones(5000), torch.zeros(5000)
    registered = export({"w": source})
    plan = AttachedTensors({"w": target}).plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    mapped.copy(plan)
    again = Mapped(directory, registered)  # While the former is there: at another address.
    mapped.close()
    source.fill_(2)
    again.copy(plan)
    assert target.eq(2).all()
    assert len(prepared) == 2
    again.close()


def test_a_mapping_that_is_gone_or_smaller_is_not_read(directory: Path, export: Export) -> None:
    registered, tiny = export({"w": torch.ones(5000)}), export({"v": torch.ones(1)})
    plan = AttachedTensors({"w": torch.zeros(5000)}).plan({"t": registered.buffers})
    mapped, small = Mapped(directory, registered), Mapped(directory, tiny)
    mapped.copy(plan)
    (number,) = registered.numbers
    with pytest.raises(MappingError, match="is to be copied but not mapped"):
        plan.copy("t", [number], {})
    with pytest.raises(MappingError, match="has 4 bytes, its table 20000"):
        plan.copy("t", [number], {number: small.memory[tiny.numbers[0]]})
    mapped.close()
    small.close()


def test_what_is_kept_is_bounded(
    directory: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_plan, "MAX_KEPT", 2)
    each = [export({f"w{place}": torch.full((3,), float(place))}) for place in range(4)]
    targets = {f"w{place}": torch.zeros(3) for place in range(4)}
    plan = AttachedTensors(targets).plan({"t": [b for one in each for b in one.buffers]})
    for _ in range(2):
        for one in each:
            mapped = Mapped(directory, one)
            mapped.copy(plan)
            mapped.close()
            assert len(plan._kept) <= 2
    assert all(target.eq(place).all() for place, target in enumerate(targets.values()))


def test_autograd_hears_of_every_round(directory: Path, export: Export) -> None:
    registered = export({"w": torch.ones(4, 2)})
    target = torch.zeros(4, 2)
    attached = AttachedTensors({"w": target}, {"w": RowBlocks((4, 2), [(2, 2), (0, 2)])})
    plan = attached.plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    for _ in range(3):
        version = target._version
        mapped.copy(plan)
        assert target._version > version
    mapped.close()


@pytest.mark.parametrize("take", ["view", "view without autograd"])
def test_a_view_that_its_parameter_has_left_behind_is_refused_and_not_written(
    directory: Path, export: Export, take: str
) -> None:
    registered = export({"q": torch.ones(2, 4)})
    fused = nn.Linear(4, 6, bias=False)
    with torch.set_grad_enabled(take == "view"):
        part = fused.weight[2:4]
    plan = AttachedTensors({"q": part}).plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    mapped.copy(plan)
    assert fused.weight[2:4].eq(1).all()
    fused.weight.data = torch.zeros(6, 4)
    before = part.detach().clone()
    with pytest.raises(AttachError, match="'q' was attached as a view of a tensor that has been"):
        mapped.copy(plan)
    assert torch.equal(part, before)
    mapped.close()


def test_a_tensor_that_was_a_view_may_itself_be_given_other_memory(
    directory: Path, export: Export
) -> None:
    part = torch.zeros(8)[2:6]
    registered = export({"w": torch.ones(4)})
    plan = AttachedTensors({"w": part}).plan({"t": registered.buffers})
    mapped = Mapped(directory, registered)
    for _ in range(3):
        mapped.copy(plan)
        assert part.eq(1).all()
        part.data = torch.zeros(4)
    mapped.close()
