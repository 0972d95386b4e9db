"""Attaching: what is wanted is put together from what is offered, copied, and counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tensorlease.agents.copy_plan import Copied, CopyPlan
from tensorlease.agents.errors import (
    AttachError,
    CoverageError,
    ExportError,
    MappingError,
    MismatchError,
)
from tensorlease.agents.mappings import process_mappings
from tensorlease.agents.pieces import RowBlocks
from tensorlease.agents.sink import AttachedTensors
from tensorlease.agents.source import RegisteredBuffers
from tensorlease.protocol.regions import OverlapError
from tensorlease.protocol.tables import Buffer

from .exports import Export, exporting

pytestmark = pytest.mark.usefixtures("directory")


def _copy(plan: CopyPlan) -> int:
    """Copies all that a plan takes, as an agent does; returns the bytes."""
    mappings = process_mappings()
    total = 0
    for source, numbers in plan.takes.items():
        handles = plan.handles(source)
        mapped = {number: mappings.map(source, number, handles[number]) for number in handles}
        total += plan.copy(source, numbers, mapped).nbytes
        del mapped
        for number in handles:
            assert mappings.unmap(source, number)  # no view is left
    return total


def _offers(**sources: RegisteredBuffers) -> dict[str, list[Buffer]]:
    return {name: registered.buffers for name, registered in sources.items()}


def test_a_models_parameters_arrive_in_place(export: Export) -> None:
    policy, engine = nn.Linear(64, 32), nn.Linear(64, 32)
    attached = AttachedTensors(engine.named_parameters())
    registered = export(dict(policy.named_parameters()))
    plan = attached.plan(_offers(t=registered))
    assert plan.complete
    assert plan.takes == {"t": registered.numbers}
    before = [parameter.data_ptr() for parameter in engine.parameters()]
    assert _copy(plan) == plan.nbytes == attached.nbytes == (64 * 32 + 32) * 4
    assert [parameter.data_ptr() for parameter in engine.parameters()] == before
    for ours, theirs in zip(engine.parameters(), policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.requires_grad
    assert plan.unwanted == ()


def test_what_arrived_is_a_copy_that_the_trainer_cannot_change(export: Export) -> None:
    source, target = torch.arange(1000.0), torch.zeros(1000)
    registered = export({"w": source})
    _copy(AttachedTensors({"w": target}).plan(_offers(t=registered)))
    source.fill_(-1)
    registered.close()
    assert torch.equal(target, torch.arange(1000.0))
    assert process_mappings().held() == []


def test_autograd_is_told_that_a_tensor_changed(export: Export) -> None:
    target = nn.Parameter(torch.ones(3))
    loss = (target * target).sum()
    _copy(AttachedTensors({"w": target}).plan(_offers(t=export({"w": torch.zeros(3)}))))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("transposed", [False, True])
def test_tensors_made_in_inference_mode_are_written(export: Export, transposed: bool) -> None:
    with torch.inference_mode():
        target = torch.zeros(4, 3)
        target = target.t() if transposed else target
    source = torch.rand(target.shape)
    _copy(AttachedTensors({"w": target}).plan(_offers(t=export({"w": source}))))
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.uint32, torch.complex128],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_size_of_element_arrives_also_in_a_transposed_tensor(
    export: Export, dtype: torch.dtype, transposed: bool
) -> None:
    raw = torch.randint(0, 2, (12, 16 * dtype.itemsize), dtype=torch.uint8)
    source = raw.clone().view(dtype)
    target = torch.zeros_like(raw).view(dtype)
    if transposed:
        target = torch.zeros(source.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype)
        target = target.view(source.shape[::-1]).t()
    _copy(AttachedTensors({"w": target}).plan(_offers(t=export({"w": source}))))
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    carrier = size.get(dtype.itemsize, torch.complex128)
    assert torch.equal(target.view(carrier), source.view(carrier))


def test_empty_tensors_and_scalars_arrive(export: Export) -> None:
    registered = export({"e": torch.zeros(4, 0, 8), "s": torch.tensor(3.5), "n": torch.ones(2)})
    target = {"e": torch.zeros(4, 0, 8), "s": torch.tensor(0.0), "n": torch.zeros(2)}
    attached = AttachedTensors(target)
    plan = attached.plan(_offers(t=registered))
    assert plan.complete
    assert _copy(plan) == 12
    assert target["s"].item() == 3.5
    coverage = attached.coverage()
    coverage.staged(plan, "t", registered.numbers)
    assert coverage.complete()
    only = AttachedTensors({"e": torch.zeros(4, 0, 8)}).plan(_offers(t=registered))
    assert only.complete
    assert only.takes == {}


def test_only_what_is_wanted_is_taken_and_the_rest_is_named(export: Export) -> None:
    first, second = export({"a": torch.ones(2), "b": torch.ones(2)}), export({"c": torch.ones(2)})
    plan = AttachedTensors({"a": torch.zeros(2)}).plan({"t": [*first.buffers, *second.buffers]})
    assert plan.takes == {"t": first.numbers}
    assert plan.unwanted == ("b", "c")
    assert plan.copy("t", second.numbers, {}) == Copied(0, 0)


def test_names_may_differ_between_trainer_and_worker(export: Export) -> None:
    registered = export({"model.w": torch.ones(2), "model.b": torch.full((2,), 2.0)})
    target = {"w": torch.zeros(2), "bias": torch.zeros(2)}
    by_call = AttachedTensors(target, rename=lambda name: "model." + name[0])
    by_map = AttachedTensors(target, rename={"w": "model.w", "bias": "model.b"})
    assert by_call.names == by_map.names == ("model.w", "model.b")
    _copy(by_call.plan(_offers(t=registered)))
    assert (target["w"][0].item(), target["bias"][0].item()) == (1.0, 2.0)
    partly = AttachedTensors(target, rename={"w": "model.w"})
    assert partly.names == ("model.w", "bias")


# Missing and mismatching.


def test_a_name_that_nobody_offers_is_missing_unless_it_may_be(export: Export) -> None:
    offers = _offers(t=export({"a": torch.ones(2)}))
    target = {"a": torch.zeros(2), "b": torch.zeros(2)}
    plan = AttachedTensors(target).plan(offers)
    assert not plan.complete
    assert plan.missing == ("b: not offered; offered are: a (rename= says which is meant)",)
    with pytest.raises(CoverageError, match="b: not offered"):
        plan.require_complete()
    loose = AttachedTensors(target, strict=False).plan(offers)
    assert loose.complete
    loose.require_complete()


def test_a_dtype_or_shape_that_differs_is_refused_by_name(export: Export) -> None:
    offers = _offers(t=export({"w": torch.ones(2, 3)}))
    with pytest.raises(MismatchError, match="'w' is float16 here and float32 at t"):
        AttachedTensors({"w": torch.zeros(2, 3, dtype=torch.float16)}).plan(offers)
    with pytest.raises(MismatchError, match=r"'w' has the global shape \(3, 2\) here and \(2, 3\)"):
        AttachedTensors({"w": torch.zeros(3, 2)}).plan(offers)


def test_tensors_that_cannot_be_written_are_refused_by_name() -> None:
    with pytest.raises(AttachError, match="'w' is expanded.*clone it first"):
        AttachedTensors({"w": torch.zeros(1).expand(4)})
    with pytest.raises(AttachError, match="'w' is on the meta device"):
        AttachedTensors({"w": torch.zeros(1, device="meta")})


def test_a_tensor_that_was_replaced_by_another_shape_is_refused_before_a_byte_is_written(
    export: Export,
) -> None:
    registered = export({"a": torch.ones(4), "w": torch.ones(4, 4)})
    model = nn.Linear(4, 4, bias=False)
    other = torch.zeros(4)
    plan = AttachedTensors({"a": other, "w": model.weight}).plan(_offers(t=registered))
    for repacked in (torch.zeros(0), torch.zeros(8, 4).t()[:, :4]):
        model.weight.data = repacked
        with pytest.raises(AttachError, match="'w' was replaced since it was attached"):
            _copy(plan)
        process_mappings().unmap("t", registered.numbers[0])
    assert other.eq(0).all()


def test_a_tensor_of_another_dtype_than_was_attached_is_refused_before_a_byte_is_written(
    export: Export,
) -> None:
    registered = export({"w": torch.ones(4, 4)})
    model = nn.Linear(4, 4, bias=False)
    plan = AttachedTensors({"w": model.weight}).plan(_offers(t=registered))
    for convert in (model.half, model.double):
        convert()
        before = model.weight.detach().clone()
        with pytest.raises(AttachError, match="'w' was replaced.*then float32"):
            _copy(plan)
        process_mappings().unmap("t", registered.numbers[0])
        assert model.weight.equal(before)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_that_has_lost_its_memory_is_refused(export: Export, transposed: bool) -> None:
    registered = export({"w": torch.ones(4, 8)})
    target = torch.zeros(8, 4).t() if transposed else torch.zeros(4, 8)
    plan = AttachedTensors({"w": target}).plan(_offers(t=registered))
    for left in (127, 0):
        target.untyped_storage().resize_(left)
        with pytest.raises(AttachError, match=f"'w' has lost its memory.*[(]{left} bytes"):
            _copy(plan)
        process_mappings().unmap("t", registered.numbers[0])
    target.untyped_storage().resize_(128)
    assert _copy(plan) == 128
    assert target.eq(1).all()


def test_a_buffer_that_is_not_mapped_or_too_small_is_not_read(export: Export) -> None:
    registered, tiny = export({"w": torch.ones(100)}), export({"v": torch.ones(1)})
    plan = AttachedTensors({"w": torch.zeros(100)}).plan(_offers(t=registered))
    (number,) = registered.numbers
    with pytest.raises(MappingError, match=f"buffer {number} of t is to be copied but not mapped"):
        plan.copy("t", [number], {})
    mappings = process_mappings()
    handle = tiny.buffers[0].handle
    assert handle is not None
    small = mappings.map("x", tiny.numbers[0], handle)
    with pytest.raises(MappingError, match="has 4 bytes, its table 400"):
        plan.copy("t", [number], {number: small})
    assert mappings.unmap("x", tiny.numbers[0])


# Tied tensors.


def _tied() -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0)
    return {"embed": weight, "head": weight}


@pytest.mark.parametrize("offered", ["both", "embed alone"])
def test_a_worker_with_tied_weights_takes_them_once(export: Export, offered: str) -> None:
    source = _tied()
    if offered == "embed alone":
        del source["head"]
    target = torch.zeros(6)
    attached = AttachedTensors({"embed": target, "head": target})
    plan = attached.plan(_offers(t=export(source)))
    assert plan.complete
    assert plan.unwanted == ()
    assert _copy(plan) == attached.nbytes == 24
    assert torch.equal(target, torch.arange(6.0))


@pytest.mark.parametrize("parting", ["embed", "head"])
@pytest.mark.parametrize("copied", [False, True])
def test_tied_weights_that_part_are_refused_and_not_written(
    parting: str, copied: bool, export: Export
) -> None:
    embed = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
    target = {"embed": embed, "head": torch.nn.Parameter(embed.data, requires_grad=False)}
    registered = export(_tied())
    plan = AttachedTensors(target).plan(_offers(t=registered))
    if copied:
        _copy(plan)
    target[parting].data = torch.zeros(6)
    with pytest.raises(AttachError, match="'head' was one tensor with 'embed' when it was att"):
        _copy(plan)
    process_mappings().unmap("t", registered.numbers[0])
    assert target[parting].eq(0).all()
    target["head"].data = embed.data
    _copy(plan)
    assert torch.equal(target["head"], torch.arange(6.0))


def test_a_worker_without_tied_weights_copies_them_to_both(export: Export) -> None:
    target = {"embed": torch.zeros(6), "head": torch.zeros(6)}
    registered = export(_tied())
    plan = AttachedTensors(target).plan(_offers(t=registered))
    assert registered.nbytes == 24
    assert _copy(plan) == 48
    assert torch.equal(target["embed"], target["head"])
    assert torch.equal(target["head"], torch.arange(6.0))


def test_an_alias_is_found_under_its_own_name_and_its_other_name_is_not_unwanted(
    export: Export,
) -> None:
    target = torch.zeros(6)
    plan = AttachedTensors({"head": target}).plan(_offers(t=export(_tied())))
    assert plan.complete
    assert plan.unwanted == ()
    _copy(plan)
    assert torch.equal(target, torch.arange(6.0))


def test_an_untied_worker_misses_the_head_that_only_the_embedding_stands_for(
    export: Export,
) -> None:
    offers = _offers(t=export({"embed": torch.ones(6)}))
    plan = AttachedTensors({"embed": torch.zeros(6), "head": torch.zeros(6)}).plan(offers)
    assert plan.missing == ("head: not offered; offered are: embed (rename= says which is meant)",)
    many = _offers(t=export({f"x{place}": torch.ones(6) for place in range(5)}))
    (text,) = AttachedTensors({"head": torch.zeros(6)}).plan(many).missing
    assert "offered are: x0, x1, x2, ... (rename=" in text


def test_two_tensors_for_a_tied_one_are_refused_by_name(export: Export) -> None:
    offers = _offers(t=export({"embed": torch.ones(6), "head": torch.zeros(6)}))
    target = torch.zeros(6)
    with pytest.raises(MismatchError, match="'head' is one tensor with 'embed' here and two"):
        AttachedTensors({"embed": target, "head": target}).plan(offers)


# Pieces.


def _row_ranks(export: Export, full: torch.Tensor, cuts: list[int]) -> dict[str, list[Buffer]]:
    offers: dict[str, list[Buffer]] = {}
    for rank, (begin, end) in enumerate(itertools.pairwise(cuts)):
        where = {"w": (tuple(full.shape), (begin, 0))}
        offers[f"rank{rank}"] = export({"w": full[begin:end].clone()}, where).buffers
    return offers


def test_a_worker_puts_together_what_the_ranks_hold(export: Export) -> None:
    full = torch.arange(60.0).view(10, 6)
    offers = _row_ranks(export, full, [0, 3, 3, 7, 10])
    whole = torch.zeros(10, 6)
    attached = AttachedTensors({"w": whole})
    plan = attached.plan(offers)
    assert plan.complete
    assert _copy(plan) == 240
    assert torch.equal(whole, full)
    columns = torch.zeros(10, 2)
    pieces = AttachedTensors({"w": columns}, regions={"w": ((10, 6), (0, 3))})
    assert _copy(pieces.plan(offers)) == 80
    assert torch.equal(columns, full[:, 3:5])
    rows = torch.zeros(2, 6)
    some = AttachedTensors({"w": rows}, regions={"w": ((10, 6), (4, 0))}).plan(offers)
    assert list(some.takes) == ["rank2"]
    _copy(some)
    assert torch.equal(rows, full[4:6])


def test_a_part_that_nobody_holds_is_missing_with_its_count(export: Export) -> None:
    offers = _row_ranks(export, torch.ones(10, 6), [0, 3, 7])
    plan = AttachedTensors({"w": torch.zeros(10, 6)}).plan(offers)
    assert plan.missing == ("w: 42 of 60 elements of [0:10, 0:6] offered",)


def test_of_equal_regions_the_nearest_is_taken(export: Export) -> None:
    offers = _offers(far=export({"w": torch.ones(2)}), near=export({"w": torch.zeros(2)}))
    attached = AttachedTensors({"w": torch.zeros(2)})
    assert list(attached.plan(offers).takes) == ["far"]
    assert list(attached.plan(offers, ["near", "far"]).takes) == ["near"]
    assert list(attached.plan(offers, ["near"]).takes) == ["near"]


def test_unequal_regions_that_overlap_are_refused_by_name(export: Export) -> None:
    offers = _row_ranks(export, torch.ones(10, 6), [0, 3, 7])
    offers["whole"] = export({"w": torch.ones(10, 6)}).buffers
    with pytest.raises(OverlapError, match="tensor 'w' is offered as"):
        AttachedTensors({"w": torch.zeros(10, 6)}).plan(offers)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_any_cut_arrives_exactly(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[axis], *data.draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
    with exporting() as export:
        offers: dict[str, list[Buffer]] = {}
        for rank, (begin, end) in enumerate(itertools.pairwise(cuts)):
            start = tuple(begin if place == axis else 0 for place in range(len(shape)))
            piece = full.narrow(axis, begin, end - begin)
            piece = piece.clone(memory_format=torch.contiguous_format)
            offers[str(rank)] = export({"w": piece}, {"w": (shape, start)}).buffers
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        length = tuple(
            data.draw(st.integers(1, size - begin))
            for size, begin in zip(shape, start, strict=True)
        )
        transposed = data.draw(st.booleans())
        target = torch.zeros(length[::-1]).permute(*reversed(range(len(shape))))
        target = target if transposed else target.contiguous()
        plan = AttachedTensors({"w": target}, regions={"w": (shape, start)}).plan(offers)
        assert plan.complete
        _copy(plan)
    expected = full[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))]
    assert torch.equal(target, expected)


def test_neighbours_on_both_sides_are_copied_as_one(export: Export) -> None:
    flat, target = torch.arange(100.0), torch.zeros(100)
    names = {f"t{place}": slice(place * 10, place * 10 + 10) for place in range(10)}
    registered = export({name: flat[where] for name, where in names.items()})
    attached = AttachedTensors({name: target[where] for name, where in names.items()})
    plan = attached.plan(_offers(t=registered))
    mappings = process_mappings()
    (number,) = registered.numbers
    mapped = mappings.map("t", number, plan.handles("t")[number])
    assert plan.copy("t", [number], {number: mapped}) == Copied(nbytes=400, copies=1)
    assert torch.equal(target, flat)
    assert mappings.unmap("t", number)


# The account of a round.


def test_a_round_is_complete_when_every_wanted_region_was_filled(export: Export) -> None:
    offers = _row_ranks(export, torch.ones(4, 2), [0, 2, 4])
    attached = AttachedTensors({"w": torch.zeros(4, 2)})
    plan = attached.plan(offers)
    coverage = attached.coverage()
    assert coverage.missing() == ("w: 0 of 8 elements filled",)
    coverage.staged(plan, "rank0", plan.takes["rank0"])
    coverage.staged(plan, "rank0", plan.takes["rank0"])
    assert coverage.missing() == ("w: 4 of 8 elements filled",)
    coverage.staged(plan, "rank1", plan.takes["rank1"])
    assert coverage.complete()
    coverage.reset()
    assert not coverage.complete()


def test_batches_of_a_ring_add_up_and_a_region_from_two_ranks_counts_once(
    export: Export,
) -> None:
    attached = AttachedTensors({"a": torch.zeros(2), "b": torch.zeros(2)})
    coverage = attached.coverage()
    for rank, name in (("rank0", "a"), ("rank1", "a"), ("rank0", "b")):
        batch = export({name: torch.ones(2)})
        plan = attached.plan({rank: batch.buffers}, partial=True)
        assert plan.missing == ()
        _copy(plan)
        coverage.staged(plan, rank, batch.numbers)
        assert coverage.complete() == (name == "b")


def test_batches_that_overlap_are_refused_by_name(export: Export) -> None:
    attached = AttachedTensors({"w": torch.zeros(4, 2)})
    coverage = attached.coverage()
    for where, rows in (((0, 0), 3), ((2, 0), 2)):
        batch = export({"w": torch.ones(rows, 2)}, {"w": ((4, 2), where)})
        plan = attached.plan({"t": batch.buffers}, partial=True)
        if rows == 3:
            coverage.staged(plan, "t", batch.numbers)
        else:
            with pytest.raises(OverlapError, match="'w'"):
                coverage.staged(plan, "t", batch.numbers)


def test_a_subset_round_must_fill_what_it_has_begun_to_fill_and_nothing_else(
    export: Export,
) -> None:
    attached = AttachedTensors({"a": torch.zeros(4), "b": torch.zeros(2)})
    coverage = attached.coverage(subset=True)
    assert coverage.untouched
    for half, text in ((0, ("a: 2 of 4 elements filled",)), (2, ())):
        batch = export({"a": torch.ones(2)}, regions={"a": ((4,), (half,))})
        plan = attached.plan({"t": batch.buffers}, partial=True)
        coverage.staged(plan, "t", batch.numbers)
        assert coverage.missing() == text
    assert not coverage.untouched


def test_a_subset_round_that_has_begun_a_tensor_of_row_blocks_must_fill_all_of_them(
    export: Export,
) -> None:
    where = RowBlocks((8, 2), [(6, 2), (0, 2)])
    attached = AttachedTensors({"w": torch.zeros(4, 2), "v": torch.zeros(2)}, {"w": where})
    coverage = attached.coverage(subset=True)
    for begin, missing in ((6, ("w: 0 of 4 elements filled",)), (0, ())):
        batch = export({"w": torch.ones(2, 2)}, {"w": ((8, 2), (begin, 0))})
        plan = attached.plan({"t": batch.buffers}, partial=True)
        coverage.staged(plan, "t", batch.numbers)
        assert coverage.missing() == missing


def test_a_received_copy_may_be_handed_on_and_the_mapping_may_not(export: Export) -> None:
    registered = export({"w": torch.ones(2)})
    target = torch.zeros(2)
    plan = AttachedTensors({"w": target}).plan(_offers(t=registered))
    _copy(plan)
    mappings = process_mappings()
    (number,) = registered.numbers
    view = mappings.map("t", number, plan.handles("t")[number]).flat()
    with pytest.raises(ExportError, match="was received"):
        export({"w": view})
    del view
    assert mappings.unmap("t", number)
    assert export({"w": target}).nbytes == 8
