"""Layouts of trainers and workers meet: boxes, row blocks, fused parameters, replicas, parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlease.agents import source
from tensorlease.agents.copy_plan import CopyPlan
from tensorlease.agents.errors import MismatchError
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.pieces import Piece, Place, RowBlocks
from tensorlease.agents.sink import AttachedTensors
from tensorlease.protocol.regions import OverlapError
from tensorlease.protocol.tables import BatchBody, Buffer, decode_batch, encode_body

from .exports import Export, exporting

pytestmark = pytest.mark.usefixtures("directory")


def _copy(plan: CopyPlan) -> list[tuple[str, int]]:
    """Copies all that a plan takes, as an agent does; returns what was mapped for it."""
    mappings = process_mappings()
    held: list[tuple[str, int]] = []
    for name, numbers in plan.takes.items():
        handles = plan.handles(name)
        mapped = {number: mappings.map(name, number, handles[number]) for number in handles}
        plan.copy(name, numbers, mapped)
        del mapped
        held += [(name, number) for number in handles]
    for name, number in held:
        assert mappings.unmap(name, number)
    return held


# ---------------------------------------------------------------- any layout to any other


@st.composite
def _layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[torch.Tensor, Place]]:
    """Cuts a tensor into parts, each with its rows in any order.

    Returns of each its values where element number n of the whole is n, and its place.
    """
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts: list[tuple[torch.Tensor, Place]] = []
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    for axis, _ in enumerate(shape):
        if draw(st.booleans()):  # not every axis is cut
            cuts[axis] = [0, shape[axis]]
    for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        part = full[tuple(slice(*span) for span in box)]
        start = tuple(begin for begin, _ in box)
        if draw(st.booleans()):
            parts.append((part.clone(memory_format=torch.contiguous_format), Piece(shape, start)))
            continue
        inner = sorted({0, len(part), *draw(st.lists(st.integers(0, len(part)), max_size=3))})
        blocks = draw(st.permutations(list(itertools.pairwise(inner))))
        rows = torch.cat([part[begin:end] for begin, end in blocks])
        where = [(start[0] + begin, end - begin) for begin, end in blocks]
        parts.append((rows, RowBlocks(shape, where, start[1:])))
    return parts


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_of_trainers_arrives_in_any_layout_of_workers(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    held, wanted = data.draw(_layouts(shape)), data.draw(_layouts(shape))
    with exporting() as export:
        offers = {
            str(rank): export({"w": part}, {"w": where}).buffers
            for rank, (part, where) in enumerate(held)
        }
        for expected, where in wanted:
            target = torch.full(expected.shape, -1.0)
            if data.draw(st.booleans()):  # its elements lie in another order in memory
                target = torch.full(expected.shape[::-1], -1.0)
                target = target.permute(*reversed(range(len(shape))))
            attached = AttachedTensors({"w": target}, {"w": where})
            plan = attached.plan(offers)
            assert plan.missing == ()
            assert plan.nbytes == expected.numel() * 4  # each element once
            _copy(plan)
            assert torch.equal(target, expected)
            coverage = attached.coverage()
            for name, numbers in plan.takes.items():
                assert not coverage.complete()
                coverage.staged(plan, name, numbers)
            assert coverage.complete()


def test_replicated_row_blocks_are_one_and_the_nearest_is_taken(export: Export) -> None:
    where = RowBlocks((6, 2), [(4, 2), (0, 2)])
    offers = {
        name: export({"w": torch.full((4, 2), value)}, {"w": where}).buffers
        for name, value in (("far", 1.0), ("near", 2.0))
    }
    offers["rest"] = export({"w": torch.full((2, 2), 3.0)}, {"w": ((6, 2), (2, 0))}).buffers
    target = torch.zeros(6, 2)
    plan = AttachedTensors({"w": target}).plan(offers, ["near"])
    assert set(plan.takes) == {"near", "rest"}
    _copy(plan)
    assert target[:, 0].tolist() == [2, 2, 3, 3, 2, 2]


def test_row_blocks_that_overlap_another_box_without_being_equal_are_refused_by_name(
    export: Export,
) -> None:
    offers = {
        "a": export({"w": torch.ones(4, 2)}, {"w": RowBlocks((6, 2), [(4, 2), (0, 2)])}).buffers,
        "b": export({"w": torch.ones(3, 2)}, {"w": ((6, 2), (1, 0))}).buffers,
    }
    with pytest.raises(OverlapError, match=r"'w' is offered as \[0:2, 0:2\] and as \[1:4, 0:2\]"):
        AttachedTensors({"w": torch.zeros(6, 2)}).plan(offers)


def test_a_part_of_row_blocks_that_nobody_holds_is_missing_with_its_count(export: Export) -> None:
    offers = {"t": export({"w": torch.ones(4, 2)}, {"w": ((8, 2), (0, 0))}).buffers}
    where = RowBlocks((8, 2), [(3, 3), (0, 1)])
    plan = AttachedTensors({"w": torch.zeros(4, 2)}, {"w": where}).plan(offers)
    assert plan.missing == ("w: 2 of 6 elements of [3:6, 0:2] offered",)


def test_a_shape_that_differs_names_both_the_rank_and_the_way_out(export: Export) -> None:
    offers = {"t": export({"w": torch.ones(8, 2)}).buffers}
    with pytest.raises(
        MismatchError,
        match=r"'w' has the global shape \(4, 2\) here and \(8, 2\) at rank 3: make them equal, or for a"
        r" piece of a larger tensor name its global shape and start, or its RowBlocks, by regions= on the",
    ):
        AttachedTensors({"w": torch.zeros(4, 2)}).plan(offers, called={"t": "rank 3"})


# ---------------------------------------------------------------- fused parameters


def _member(
    member: int, size: int, dtype: torch.dtype, hidden: int
) -> tuple[dict[str, torch.Tensor], dict[str, Place], torch.Tensor, torch.Tensor]:
    """The fused parameters of one tensor-parallel member, as views of the named tensors."""
    q, kv, ffn = 8 // size, 4 // size, 12 // size
    qkv = torch.zeros(q + 2 * kv, hidden, dtype=dtype)
    gate_up = torch.zeros(2 * ffn, hidden, dtype=dtype)
    views = {
        "q": qkv[:q],
        "k": qkv[q : q + kv],
        "v": qkv[q + kv :],
        "gate": gate_up[:ffn],
        "up": gate_up[ffn:],
    }
    rows = {"q": 8, "k": 4, "v": 4, "gate": 12, "up": 12}
    places: dict[str, Place] = {
        name: Piece((rows[name], hidden), (member * len(view), 0)) for name, view in views.items()
    }
    return views, places, qkv, gate_up


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_parameters_of_tensor_parallel_members_are_put_together_from_named_tensors(
    export: Export, size: int
) -> None:
    hidden = 6
    weights = {
        name: torch.rand(rows, hidden).to(torch.bfloat16)
        for name, rows in {"q": 8, "k": 4, "v": 4, "gate": 12, "up": 12}.items()
    }
    offers = {"t": export(weights).buffers}
    for member in range(size):
        views, places, qkv, gate_up = _member(member, size, torch.bfloat16, hidden)
        attached = AttachedTensors(views, places)
        plan = attached.plan(offers)
        assert plan.missing == ()
        _copy(plan)
        parts = {name: weight.chunk(size)[member] for name, weight in weights.items()}
        assert torch.equal(qkv, torch.cat([parts["q"], parts["k"], parts["v"]]))
        assert torch.equal(gate_up, torch.cat([parts["gate"], parts["up"]]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fused_tensor_with_interleaved_heads_is_cut_into_fused_members(
    export: Export, size: int
) -> None:
    # The trainer has q, k and v of each head side by side, workers all q, then all k, then all v.
    heads, dim = 4, 2
    fused = torch.arange(heads * 3 * dim * 5.0).view(heads * 3 * dim, 5)
    by_kind = fused.view(heads, 3, dim, 5).transpose(0, 1)
    offers = {"t": export({"qkv": fused}).buffers}
    for member in range(size):
        mine = range(member * heads // size, (member + 1) * heads // size)
        blocks = [((head * 3 + kind) * dim, dim) for kind in range(3) for head in mine]
        target = torch.zeros(3 * len(mine) * dim, 5)
        attached = AttachedTensors({"qkv": target}, {"qkv": RowBlocks(fused.shape, blocks)})
        _copy(attached.plan(offers))
        assert torch.equal(target, by_kind[:, mine.start : mine.stop].reshape(-1, 5))


def test_names_that_are_tied_may_consist_of_row_blocks(export: Export) -> None:
    weight = torch.arange(8.0).view(4, 2)
    where = RowBlocks((4, 2), [(2, 2), (0, 2)])
    registered = export({"embed": weight, "head": weight}, {"embed": where, "head": where})
    assert registered.nbytes == 32
    assert registered.names == ("embed", "head")
    assert not registered.pieces  # all of it is there
    target = torch.zeros(4, 2)
    attached = AttachedTensors({"embed": target, "head": target})
    assert attached.nbytes == 32
    _copy(attached.plan({"t": registered.buffers}))
    assert torch.equal(target, weight.roll(2, 0))


# ---------------------------------------------------------------- only what is wanted


def test_an_expert_parallel_worker_takes_and_maps_its_experts_alone(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT_BYTES", 1024)
    experts = {f"experts.{n}.w": torch.full((256,), float(n)) for n in range(8)}
    registered = export(experts | {"router": torch.ones(256)})
    assert len(registered.buffers) == 9
    for member in range(4):
        mine = {name: torch.zeros(256) for name in list(experts)[2 * member : 2 * member + 2]}
        plan = AttachedTensors(mine).plan({"t": registered.buffers})
        assert plan.takes == {"t": registered.numbers[2 * member : 2 * member + 2]}
        assert len(plan.unwanted) == 7
        assert _copy(plan) == [("t", number) for number in plan.takes["t"]]
        assert all(torch.equal(target, experts[name]) for name, target in mine.items())


def test_of_fused_experts_a_member_takes_its_rows_and_maps_who_holds_them(
    export: Export,
) -> None:
    # 8 experts of 3 rows; each of 4 ranks holds two of them.
    full = torch.arange(24.0 * 2).view(24, 2)
    offers: dict[str, list[Buffer]] = {
        f"rank{rank}": export(
            {"experts": full[6 * rank : 6 * rank + 6].clone()},
            {"experts": ((24, 2), (6 * rank, 0))},
        ).buffers
        for rank in range(4)
    }
    target = torch.zeros(6, 2)
    where = RowBlocks((24, 2), [(21, 3), (3, 3)])  # the experts 7 and 1
    plan = AttachedTensors({"experts": target}, {"experts": where}).plan(offers)
    assert {name for name, _ in _copy(plan)} == {"rank0", "rank3"}
    assert torch.equal(target, torch.cat([full[21:], full[3:6]]))


def test_a_pipeline_stage_takes_and_maps_its_layers_alone(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SEGMENT_BYTES", 2048)
    layers = {f"layers.{n}.{kind}": torch.rand(256) for n in range(4) for kind in ("a", "b")}
    registered = export(layers)
    assert len(registered.buffers) == 4
    stage = {name: torch.zeros(256) for name in layers if name[7] in "23"}
    plan = AttachedTensors(stage).plan({"t": registered.buffers})
    assert _copy(plan) == [("t", number) for number in registered.numbers[2:]]
    assert all(torch.equal(target, layers[name]) for name, target in stage.items())


# ---------------------------------------------------------------- sizes, ties, dtypes


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_tensors_of_any_size_around_a_segments_arrive_in_any_order(
    export: Export, monkeypatch: pytest.MonkeyPatch, order: Sequence[int]
) -> None:
    limit = 2**14
    monkeypatch.setattr(source, "SEGMENT_BYTES", limit)
    each = [
        torch.randint(0, 255, (limit - 1,), dtype=torch.uint8),
        torch.rand(limit // 8, dtype=torch.float64),
        torch.randint(0, 2, (limit + 1,), dtype=torch.uint8).bool(),
        torch.rand(5 * limit // 2).to(torch.bfloat16),
    ]
    tensors = {f"t{place}": each[place] for place in order} | {"odd": torch.ones(3).half()}
    registered = export(tensors)
    starts = [entry.offset for buffer in registered.buffers for entry in buffer.entries]
    assert all(start % source.ALIGNMENT == 0 for start in starts)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    plan = AttachedTensors(targets).plan({"t": registered.buffers})
    assert plan.missing == ()
    _copy(plan)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())


def test_a_weight_and_its_scale_arrive_byte_for_byte_or_nothing_does(export: Export) -> None:
    raw = torch.arange(256, dtype=torch.uint8)  # every value, also those that are no number
    weight, scale = raw.view(torch.float8_e4m3fn), raw[:8].view(torch.float8_e8m0fnu)
    packed = torch.randint(0, 255, (16,), dtype=torch.uint8)  # two int4 in each
    wanted = {
        "w": torch.zeros(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "w.scale": torch.zeros(8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "packed": torch.zeros(16, dtype=torch.uint8),
    }
    attached = AttachedTensors(wanted)
    registered = export({"w": weight.clone(), "w.scale": scale.clone(), "packed": packed})
    kinds = {e.name: e.dtype for buffer in registered.buffers for e in buffer.entries}
    assert kinds == {"w": "float8_e4m3fn", "w.scale": "float8_e8m0fnu", "packed": "uint8"}
    without = export({"w": weight.clone(), "packed": packed.clone()})
    plan = attached.plan({"t": without.buffers})
    assert [text.partition(";")[0] for text in plan.missing] == [
        "w.scale: not offered"
    ]  # a worker that lacks something is in no round
    wrong = export({"w": weight.clone(), "w.scale": raw[:8].clone(), "packed": packed.clone()})
    with pytest.raises(MismatchError, match="'w.scale' is float8_e8m0fnu here and uint8 at t"):
        attached.plan({"t": wrong.buffers})
    with pytest.raises(MismatchError, match="'w.scale' is float8_e8m0fnu here and uint8 at t"):
        AttachedTensors(wanted, cast="worker").plan({"t": wrong.buffers})
    _copy(attached.plan({"t": registered.buffers}))
    assert torch.equal(wanted["w"].view(torch.uint8), raw)
    assert torch.equal(wanted["w.scale"].view(torch.uint8), raw[:8])
    assert torch.equal(wanted["packed"], packed)


def test_the_table_of_row_blocks_survives_the_wire(export: Export) -> None:
    where = RowBlocks((8, 2), [(6, 2), (0, 2)])
    registered = export({"w": torch.ones(4, 2)}, {"w": where})
    body = BatchBody(registered.buffers)
    assert decode_batch(encode_body(body)) == body
    assert body.nbytes == registered.nbytes == 32
