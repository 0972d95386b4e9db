"""Whether tensors, and a model's, still lie where they lay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensorlease.agents import unmoved
from tensorlease.agents.placement import tensors_of
from tensorlease.agents.recorded import RecordedLoad
from tensorlease.agents.unmoved import HeldModel, Unmoved, UnmovedModel

CAN_GUARD = unmoved._can_guard.__wrapped__


@pytest.fixture(params=["guards", "no guards"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch's guards are asked; a torch may have none."""
    if request.param == "no guards":
        monkeypatch.setattr(unmoved, "_can_guard", lambda: False)
        return False
    if not unmoved._can_guard():
        pytest.skip(f"torch {torch.__version__} has no guards that are known")
    return True


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_that_lie_where_they_lay_but_otherwise_are_noticed(turned: bool) -> None:
    whole = torch.zeros(3, 3)
    first, second = whole[:2, :3], whole[:3, :2]  # Of one count, and one stride on each axis.
    assert (first.numel(), first.stride()) == (second.numel(), second.stride())
    if turned:
        first, second = second, first
    tensor = torch.nn.Parameter(first, requires_grad=False)
    lying = Unmoved([tensor])
    assert lying.holds()
    tensor.data = second
    assert not lying.holds()
    tensor.data = first
    assert lying.holds()


@pytest.mark.parametrize("shape", [(4, 1), (2, 1, 4)])
def test_a_column_that_is_turned_to_a_row_is_noticed(shape: tuple[int, ...]) -> None:
    tensor = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    lying, stride = Unmoved([tensor]), tensor.stride()
    tensor.data = tensor.data.transpose(0, 1)
    assert tensor.is_contiguous() and tensor.stride() == stride
    assert not lying.holds()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
def test_bytes_that_are_taken_for_other_numbers_are_noticed(dtype: torch.dtype) -> None:
    tensor = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    lying = Unmoved([tensor])
    tensor.data = tensor.data.view(dtype)
    assert not lying.holds()


@pytest.mark.parametrize("lazily", [torch.conj, torch.ops.aten._neg_view])
def test_values_that_are_others_than_what_lies_there_are_noticed(lazily: Any) -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
    lying, address = Unmoved([tensor]), tensor.data_ptr()
    tensor.data = lazily(tensor.data)
    assert tensor.data_ptr() == address
    assert not lying.holds()


def test_a_default_device_that_cannot_be_used_here_does_not_matter() -> None:
    if torch.cuda.is_available():
        pytest.skip("the device can be used")
    can = CAN_GUARD()
    with torch.device("cuda"):
        assert CAN_GUARD() == can


def test_where_the_guards_say_no_it_is_looked_at_one_by_one(guards: bool) -> None:
    tensor = torch.nn.Parameter(torch.zeros(3, 3))
    lying = Unmoved([torch.zeros(2), tensor])
    with torch.inference_mode():
        assert not lying._are_guarded()
        assert lying.holds()
    assert lying._are_guarded() == guards
    tensor.requires_grad_(False)
    assert not lying._are_guarded()
    assert lying.holds()
    with torch.inference_mode():
        tensor.data = torch.zeros(3, 3)
        assert not lying.holds()


class Guards:
    """Guards of a torch that takes them otherwise, or sees less."""

    def __init__(self, *tensors: torch.Tensor, dynamic_dims_sizes: object, **_: object) -> None:
        self._tensors = tensors

    def check(self, *tensors: torch.Tensor) -> bool:
        return [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in self._tensors]


class OtherGuards(Guards):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(*tensors, dynamic_dims_sizes=())


class FailingGuards(Guards):
    def check(self, *tensors: torch.Tensor) -> bool:
        raise TypeError("one argument, a list")


class StrictGuards(Guards):
    def check(self, *tensors: torch.Tensor) -> bool:
        return False


@pytest.mark.parametrize("given", [Guards, OtherGuards, FailingGuards, StrictGuards])
def test_guards_that_are_others_are_not_used(
    given: type[Guards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", given)
    assert not CAN_GUARD()


def test_a_tensor_whose_storage_has_shrunk_under_it_is_noticed() -> None:
    kept = []
    for count in [512, 1024, 4096, 16384] * 25:
        tensor = torch.zeros(count)
        kept.append(tensor)  # So that the allocator does not always give the same.
        lying = Unmoved([tensor])
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        storage.resize_(0)
        storage.resize_(2 * count)  # Bytes: half of what there was.
        assert not lying.holds()
        if tensor.data_ptr() == address:
            return
    pytest.skip("the allocator never gave the same memory again")


def test_of_a_view_that_nobody_else_has_it_is_noticed_that_its_storage_went_elsewhere() -> None:
    tensor = torch.zeros(4)
    view = torch.empty(0).set_(tensor.untyped_storage(), 1, (2,), (1,))
    lying = Unmoved([], [view])
    assert lying.holds()
    tensor.untyped_storage().resize_(0)
    assert not lying.holds()


class Asked(nn.Parameter):
    """A parameter as vLLM's are: torch asks it what to do, in Python."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_subclasses_of_tensors_are_not_asked() -> None:
    tensor = Asked(torch.zeros(3), requires_grad=False)
    Asked.asked = 0
    assert Unmoved([tensor]).holds()
    assert Asked.asked == 0


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))
    return made.requires_grad_(False)


def other_data(made: Any) -> None:
    made[0].weight.data = torch.zeros(3, 3)


def other_parameter(made: Any) -> None:
    made[0].weight = nn.Parameter(made[0].weight.detach(), requires_grad=False)


def other_buffer(made: Any) -> None:
    made[1].running_mean = torch.zeros(3)


def other_layer(made: Any) -> None:
    layer = nn.Linear(3, 2)
    layer.weight, layer.bias = made[2][0].weight, made[2][0].bias
    made[2][0] = layer


def one_more(made: Any) -> None:
    made[2].extra = nn.Parameter(torch.zeros(1))


def one_less(made: Any) -> None:
    made[0].bias = None


def another_name(made: Any) -> None:
    made[0].offset = made[0].bias
    del made[0].bias
    made[0].bias = None


def turned(made: Any) -> None:
    made[0].weight.data = made[0].weight.data.t()


CHANGES = [
    other_data,
    other_parameter,
    other_buffer,
    other_layer,
    one_more,
    one_less,
    another_name,
    turned,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_model_is_noticed(change: Callable[[Any], None]) -> None:
    made = model()
    lying = UnmovedModel(made)
    made[0].weight.fill_(3.0)  # type: ignore[index]
    assert lying.holds()
    change(made)
    assert not lying.holds()


@pytest.mark.parametrize("change", CHANGES)
def test_a_load_that_was_recorded_of_a_model_is_repeated_until_that_changes(
    change: Callable[[Any], None],
) -> None:
    made: Any = model()

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            made.get_parameter(name).data.copy_(tensor)

    recorded = RecordedLoad(load, made)
    assert recorded.begin() is None
    recorded.load([("0.weight", torch.ones(3, 3))])
    recorded.finish()
    for _ in range(2):
        assert recorded.begin() is recorded.recording is not None
    change(made)
    # What has the same names, and lies where it lay, may be repeated.
    same = change in (other_parameter, other_layer)
    assert (recorded.begin() is not None) == same
    recorded.abandon()


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_model_that_has_another_tensor_its_name_is_said(change: Callable[[Any], None]) -> None:
    made = model()
    held = HeldModel(made)
    assert held.replaced() == ""
    change(made)
    name: dict[Callable[[Any], None], str] = {
        other_parameter: "0.weight",
        other_buffer: "1.running_mean",
        one_less: "0.bias",
        another_name: "0.bias",
    }
    # Where the same tensor lies is not looked at here; and what is new is not asked for.
    for _ in range(2):
        assert held.replaced() == name.get(change, "")


def test_tensors_that_a_model_has_twice_are_held_by_both_names_and_those_that_are_not_kept_are_not() -> (
    None
):
    made: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    made[1].weight = made[0].weight
    made[0].register_buffer("kept", torch.zeros(1))
    made[0].register_buffer("passing", torch.zeros(1), persistent=False)
    assert [*tensors_of(made)] == ["0.weight", "1.weight", "0.kept"]
    held = HeldModel(made)
    made[0].passing = torch.ones(1)
    assert held.replaced() == ""
    made[1].weight = nn.Parameter(torch.zeros(2, 2))
    assert held.replaced() == "1.weight"


def test_a_model_with_a_parameter_that_lies_nowhere_is_looked_at_by_its_parameters() -> None:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")).requires_grad_(False)

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            made.get_parameter(name).data.copy_(tensor)

    recorded = RecordedLoad(load, made)
    recorded.begin()
    recorded.load([("0.weight", torch.ones(2, 2))])
    recorded.finish()
    assert recorded.begin() is not None
    made[0].weight.data = torch.zeros(2, 2)
    assert recorded.begin() is None
