"""Where the pieces of DTensors lie, rank by rank, without any other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorlease.agents.errors import AttachError, ExportError
from tensorlease.agents.placement import Placed, place
from tensorlease.agents.sink import AttachedTensors
from tensorlease.agents.unmoved import HeldModel
from tensorlease.protocol.errors import ConfigError
from tensorlease.protocol.regions import Region, covers, whole

Mesh = Callable[[int, tuple[int, ...]], DeviceMesh]


@pytest.fixture(name="mesh_of")
def _mesh_of() -> Iterator[Mesh]:
    """Makes the device mesh that a rank of a pretended world sees."""

    def make(rank: int, shape: tuple[int, ...]) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        world = torch.Size(shape).numel()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        return init_device_mesh("cpu", shape)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def _placed(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: list[Placement], local: tuple[int, ...]
) -> Placed:
    tensor = DTensor.from_local(
        torch.zeros(local),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    (placed,) = place({"w": tensor}, None, ExportError)
    assert placed.shape == shape
    assert type(placed.tensor) is torch.Tensor
    return placed


def test_uneven_shards_of_all_ranks_make_up_the_tensor_and_the_last_may_be_empty(
    mesh_of: Mesh,
) -> None:
    locals_ = [(2, 3), (2, 3), (1, 3), (0, 3)]
    regions = [
        _placed(mesh_of(rank, (4,)), (5, 3), [Shard(0)], local).region
        for rank, local in enumerate(locals_)
    ]
    assert regions[:3] == [
        Region((0, 0), (2, 3)),
        Region((2, 0), (2, 3)),
        Region((4, 0), (1, 3)),
    ]
    assert regions[3].count == 0
    assert regions[3].inside((5, 3))
    assert covers("w", whole((5, 3)), regions)


def test_shards_on_two_axes_make_up_the_tensor(mesh_of: Mesh) -> None:
    regions = [
        _placed(mesh_of(rank, (2, 2)), (4, 6), [Shard(0), Shard(1)], (2, 3)).region
        for rank in range(4)
    ]
    assert regions[3] == Region((2, 3), (2, 3))
    assert covers("w", whole((4, 6)), regions)


def test_two_cuts_of_one_axis_make_up_the_tensor(mesh_of: Mesh) -> None:
    regions = [
        _placed(mesh_of(rank, (2, 2)), (8,), [Shard(0), Shard(0)], (2,)).region for rank in range(4)
    ]
    assert covers("w", whole((8,)), regions)


def test_replicas_hold_the_same_region(mesh_of: Mesh) -> None:
    placements: list[Placement] = [Replicate(), Shard(1)]
    first, second = (
        _placed(mesh_of(rank, (2, 2)), (4, 6), placements, (4, 3)).region for rank in (0, 2)
    )
    assert first == second == Region((0, 0), (4, 3))
    assert _placed(mesh_of(0, (4,)), (4, 6), [Replicate()], (4, 6)).region == whole((4, 6))


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)])
def test_a_placement_that_is_no_box_is_refused_by_name(mesh_of: Mesh, placement: Placement) -> None:
    mesh = mesh_of(0, (2,))
    local = torch.zeros(4, 2) if isinstance(placement, Partial) else torch.zeros(2, 2)
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
    with pytest.raises(ExportError, match=r"'w' has the placement .*redistribute"):
        place({"w": tensor}, None, ExportError)


def test_a_dtensor_with_a_region_of_its_own_is_refused(mesh_of: Mesh) -> None:
    tensor = DTensor.from_local(torch.zeros(2), mesh_of(0, (2,)), [Shard(0)], run_check=False)
    with pytest.raises(ExportError, match="leave it out of regions"):
        place({"w": tensor}, {"w": ((4,), (0,))}, ExportError)


def test_a_local_tensor_that_its_dtensor_has_left_behind_is_known(mesh_of: Mesh) -> None:
    tensor = DTensor.from_local(torch.zeros(2), mesh_of(0, (2,)), [Shard(0)], run_check=False)
    (placed,) = place({"w": tensor}, None, ExportError)
    assert not placed.left_behind
    tensor._local_tensor = torch.zeros(2)
    assert placed.left_behind


@pytest.mark.parametrize(
    "change",
    [
        torch.t,
        torch.ops.aten._neg_view,
        lambda local: local.view(torch.int32),
        lambda local: local[:1],
    ],
)
def test_a_local_tensor_that_its_dtensor_looks_at_otherwise_is_known(
    change: Callable[[torch.Tensor], torch.Tensor], mesh_of: Mesh
) -> None:
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh_of(0, (2,)), [Shard(0)], run_check=False)
    (placed,) = place({"w": tensor}, None, ExportError)
    local = tensor._local_tensor
    tensor._local_tensor = change(local)
    assert placed.left_behind
    tensor._local_tensor = local.detach()
    assert not placed.left_behind
    empty = DTensor.from_local(torch.zeros(0), mesh_of(0, (2,)), [Shard(0)], run_check=False)
    (placed,) = place({"w": empty}, None, ExportError)
    empty._local_tensor = local[0, :0]
    assert not placed.left_behind
    empty._local_tensor = local[0, :1]
    assert placed.left_behind


def test_parameters_of_an_engines_own_class_are_plain_memory() -> None:
    class EngineParameter(torch.nn.Parameter):
        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., object],
            types: object,
            args: object = (),
            kwargs: object = None,
        ) -> object:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    (placed,) = place({"w": EngineParameter(torch.ones(2))}, None, ExportError)
    assert placed.region == whole((2,))


# ---------------------------------------------------------------- a model that FSDP has


def test_that_fsdp_puts_whole_parameters_into_a_model_is_no_replacement(mesh_of: Mesh) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fully_shard(model, mesh=mesh_of(0, (1,)))
    held, sharded = HeldModel(model), model[0].weight
    assert isinstance(sharded, DTensor)
    model(torch.ones(2, 4))
    assert model[0].weight is not sharded
    assert held.replaced() == ""
    model[1].running_mean = torch.zeros(4)
    assert held.replaced() == "1.running_mean"


# ---------------------------------------------------------------- what cannot be placed


@pytest.mark.parametrize(
    "given",
    [
        torch.nn.Linear(2, 2).parameters(),
        torch.ones(2, 2),
        "ab",
        None,
        [("w",)],
        ["ab"],
    ],
)
def test_what_has_no_names_is_refused_with_what_has(given: Any) -> None:
    with pytest.raises(ConfigError, match="give a model, or a dict of them"):
        place(given, None, ExportError)


@pytest.mark.parametrize("name", ["", "n" * 513, "\N{SNOWMAN}" * 171, "\udcff", 5, None])
def test_a_name_that_cannot_travel_is_refused(name: Any) -> None:
    with pytest.raises(ExportError, match="no usable name"):
        place({name: torch.ones(1)}, None, ExportError)


def test_a_name_that_a_worker_renames_to_one_that_cannot_travel_is_refused() -> None:
    rename: Any = {"w": 5}
    with pytest.raises(AttachError, match="'5' has no usable name"):
        AttachedTensors({"w": torch.ones(1)}, rename=rename)


@pytest.mark.parametrize(
    "region", [5, ((4,),), ((4.0,), (0,)), ("4", "0"), ((2**63,), (0,)), ((4,), (-1,))]
)
def test_a_region_of_anything_but_whole_numbers_is_refused(region: Any) -> None:
    with pytest.raises(ExportError, match="'w' (has the region|is the box)"):
        place({"w": torch.ones(2)}, {"w": region}, ExportError)


def test_a_region_of_other_integers_becomes_one_of_ints() -> None:
    region: Any = (torch.tensor([4]), [torch.tensor(1)])
    (placed,) = place({"w": torch.ones(2)}, {"w": region}, ExportError)
    assert (placed.shape, placed.region) == ((4,), Region((1,), (2,)))
    assert all(type(size) is int for size in (*placed.shape, *placed.region.start))
