"""What a loader may do with what it is given, and what is made of that: copied, ignored or left to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from tensorlease.agents import recorded
from tensorlease.agents.recorded import RecordedLoad, Recording

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

Load = Callable[[dict[str, Any], dict[str, Any]], object]
"""Parameters and sources, by name."""


class Model:
    """Parameters of a test, and a loader that does what the test says."""

    def __init__(self, load: Load, **parameters: Tensor) -> None:
        self.mine: dict[str, Any] = parameters
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            self._load(self.mine, dict(weights))


def record(model: Model, layer_of: Callable[[str], str] | None = None, **sources: Any) -> Recording:
    """Loads once; returns what was recorded."""
    load = RecordedLoad(model.load_weights, lambda: model.mine, layer_of=layer_of)
    assert load.begin() is None
    load.load((name, tensor.clone()) for name, tensor in sources.items())
    load.finish()
    assert load.recording is not None
    return load.recording


def copy(recording: Recording, sources: dict[str, Any]) -> None:
    """Does what was recorded, with other values."""
    assert recording.boxes is not None
    for want in recording.boxes.wants:
        part = sources[want.names[0]]
        for axis, (begin, length) in enumerate(
            zip(want.region.start, want.region.length, strict=True)
        ):
            part = part.narrow(axis, begin, length)
        want.placed.box().copy_(part)


def require_repeats(load: Load, parameters: dict[str, Any], sources: dict[str, Any]) -> Recording:
    """Asserts that all is copied, and that other values come as by the loader itself."""
    model = Model(load, **{name: tensor.clone() for name, tensor in parameters.items()})
    recording = record(model, **sources)
    assert dict(recording.fallback) == {}
    others = {name: tensor.flip(0) + 1 for name, tensor in sources.items()}
    copy(recording, others)
    fresh = Model(load, **{name: tensor.clone() for name, tensor in parameters.items()})
    fresh.load_weights(others.items())
    for name, tensor in fresh.mine.items():
        assert torch.equal(model.mine[name], tensor), name
    return recording


def numbers(*shape: int) -> Any:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def test_copies_by_way_of_other_tensors_are_followed() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        staging = torch.empty(4, 6)
        for place, name in enumerate(("a", "b")):
            staging.copy_(given[name])  # Used again for the next.
            mine["rows"][place].copy_(staging[1:3].contiguous().t())
        mine["joined"].copy_(torch.cat([given["a"], given["b"][:, :2]], dim=1))
        mine["stacked"].copy_(torch.stack([given["a"][0], given["b"][3]]))

    parameters = {
        "rows": torch.zeros(2, 6, 2),
        "joined": torch.zeros(4, 8),
        "stacked": torch.zeros(2, 6),
    }
    recording = require_repeats(load, parameters, {"a": numbers(4, 6), "b": -numbers(4, 6)})
    assert recording.names == {"a", "b"}


def test_constants_around_what_is_copied_stay() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["padded"].fill_(7.0)
        mine["padded"][:3].copy_(given["a"])
        mine["padded"][3:].zero_()

    require_repeats(load, {"padded": torch.zeros(5, 2)}, {"a": numbers(3, 2)})


def test_bits_of_another_dtype_and_values_that_are_converted_are_copied() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["bits"].view(torch.uint8).copy_(given["bits"].view(torch.uint8))
        mine["half"].copy_(given["full"])

    model = Model(
        load,
        bits=torch.zeros(4).to(torch.float8_e4m3fn),
        half=torch.zeros(3, dtype=torch.bfloat16),
    )
    bits = numbers(4).to(torch.float8_e4m3fn)
    recording = record(model, bits=bits, full=numbers(3))
    assert recording.names == {"bits", "full"}
    assert {w.names[0]: w.placed.dtype for w in recording.boxes.wants} == {  # type: ignore[union-attr]
        "bits": "float8_e4m3fn",
        "full": "bfloat16",
    }


def test_by_way_of_a_narrower_dtype_is_no_copy() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["w"].copy_(given["a"].bfloat16())

    model = Model(load, w=torch.zeros(3))
    assert record(model, a=numbers(3)).fallback.keys() == {"a"}


def _scale(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"])
    mine["w"].mul_(2)


def _index(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"][torch.tensor([2, 1, 0])])


def _item(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].fill_(given["a"][0].item())


def _numpy(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(torch.from_numpy(given["a"].numpy() * 2))


def _list(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(torch.tensor(given["a"].tolist()))


def _address(mine: dict[str, Any], given: dict[str, Any]) -> None:
    import ctypes

    ctypes.memmove(mine["w"].data_ptr(), given["a"].data_ptr(), 12)


def _branch(mine: dict[str, Any], given: dict[str, Any]) -> None:
    if given["a"].abs().max() > 0:
        mine["w"].copy_(given["a"])


def _broadcast(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"][:1])


def _written_over(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"])
    mine["w"][1:].zero_()


def _written_over_unseen(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"])
    mine["numpy"][0] = 5.0


def _never_copied(mine: dict[str, Any], given: dict[str, Any]) -> None:
    given["a"].clone().neg_()


def _kept(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"].copy_(given["a"])
    _left.append(given["a"].clone())


def _replaced(mine: dict[str, Any], given: dict[str, Any]) -> None:
    mine["w"] = given["a"]


_left: list[Any] = []


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (_scale, "aten::mul_"),
        (_index, "aten::index"),
        (_item, "_local_scalar_dense"),
        (_numpy, "numpy()"),
        (_list, "tolist()"),
        (_address, "data_ptr()"),
        (_branch, "aten::"),
        (_broadcast, "aten::copy_"),
        (_written_over, "something else is written"),
        (_written_over_unseen, "changed by what cannot be seen"),
        (_never_copied, "none is copied"),
        (_kept, "none of its parameters"),
        (_replaced, "the very tensor"),
    ],
)
def test_what_is_more_than_copies_is_left_to_the_loader_and_named(load: Load, why: str) -> None:
    parameter = torch.zeros(3)
    model = Model(load, w=parameter)
    if load is _written_over_unseen:
        # As a kernel that torch does not dispatch.
        memory = parameter.numpy()
        model = Model(lambda mine, given: load({**mine, "numpy": memory}, given), w=parameter)
    recording = record(model, a=numbers(3), plain=numbers(2))
    _left.clear()
    # Where values reach Python, what becomes of the others may depend on them.
    left = {"a", "plain"} if load in (_numpy, _list, _branch) else {"a"}
    assert recording.fallback.keys() == left
    assert why in recording.fallback["a"]
    assert recording.ignored == {"a", "plain"} - left


def test_an_operation_of_others_that_is_not_dispatched_is_seen() -> None:
    library = torch.library.Library("tensorlease_test", "DEF")
    library.define("pack(Tensor x) -> int")
    library.impl("pack", lambda x: 1, "CompositeImplicitAutograd")

    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["w"].copy_(given["a"])
        torch.ops.tensorlease_test.pack(mine["w"])

    try:
        recording = record(Model(load, w=torch.zeros(3)), a=numbers(3))
    finally:
        library._destroy()
    assert "tensorlease_test.pack" in recording.fallback["a"]


def test_memory_that_nobody_is_seen_to_write_makes_all_of_it_suspect() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["w"].copy_(given["a"])
        made = torch.empty(3)  # A kernel fills it.
        mine["scale"].copy_(made)

    recording = record(Model(load, w=torch.zeros(3), scale=torch.zeros(3)), a=numbers(3))
    assert "scale is written by what cannot be seen" in recording.fallback["a"]


def test_names_that_share_a_parameter_with_one_that_is_left_to_the_loader_are_too() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["qk"][:2].copy_(given["q"])
        mine["qk"][2:].copy_(given["k"] * 2)
        mine["o"].copy_(given["o"])

    sources = {"q": numbers(2), "k": numbers(2), "o": numbers(3)}
    recording = record(Model(load, qk=torch.zeros(4), o=torch.zeros(3)), **sources)
    assert recording.fallback.keys() == {"q", "k"}
    assert recording.fallback["q"] == "it shares a parameter with k"
    assert recording.names == {"o"}


def test_two_names_for_one_place_are_left_to_the_loader_which_knows_the_order() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["w"].copy_(given["a"])
        mine["w"].copy_(given["b"])

    recording = record(Model(load, w=torch.zeros(3)), a=numbers(3), b=numbers(3))
    assert recording.fallback.keys() == {"a", "b"}


def test_of_a_loader_of_whole_layers_a_layer_is_copied_as_a_whole_or_not() -> None:
    class Layers(Model):
        """Has other parameters while it loads, and puts the values into its own afterwards."""

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            own, self.mine = self.mine, {n: torch.empty_like(t) for n, t in self.mine.items()}
            super().load_weights(weights)
            for name, tensor in own.items():
                tensor.copy_(self.mine[name])
            self.mine = own

    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        for name, tensor in given.items():
            if name.endswith("scale"):
                mine[name].fill_(tensor.item())
            else:
                mine[name].copy_(tensor)

    names = ("first.w", "first.scale", "second.w", "second.b")
    model = Layers(load, **{name: torch.zeros(1) for name in names})
    sources = {name: numbers(1) for name in names}
    recording = record(model, lambda name: name.split(".")[0], **sources)
    assert recording.fallback.keys() == {"first.w", "first.scale"}
    assert recording.names == {"second.w", "second.b"}
    assert all(tensor.tolist() == [1.0] for tensor in model.mine.values())


def test_what_the_loader_does_not_ask_for_and_does_not_read() -> None:
    taken: list[str] = []

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, _ in weights:
            taken.append(name)
            return

    load = RecordedLoad(load_weights, lambda: {"w": torch.zeros(1)})
    load.begin()
    load.load([("a", numbers(1)), ("b", numbers(1))])
    load.finish()
    assert load.recording is not None
    assert taken == ["a"]
    assert load.recording.ignored == {"a"}
    assert load.fallback == {"b": "the loader did not ask for it"}


def test_a_load_that_fails_is_not_repeated_and_one_of_some_tensors_is_not_noted() -> None:
    def load(mine: dict[str, Any], given: dict[str, Any]) -> None:
        mine["w"].copy_(given["a"])
        if given["a"][0] < 0:
            raise RuntimeError("it went wrong")

    model = Model(load, w=torch.zeros(3))
    recorded = RecordedLoad(model.load_weights, lambda: model.mine)
    recorded.begin()
    with pytest.raises(RuntimeError, match="it went wrong"):
        recorded.load([("a", -numbers(3))])
    recorded.finish()
    assert recorded.recording is None
    recorded.begin(whole=False)
    recorded.load([("a", numbers(3))])
    recorded.finish()
    assert recorded.recording is None
    assert model.mine["w"].tolist() == [1.0, 2.0, 3.0]


def test_what_was_recorded_counts_only_for_the_parameters_that_were_there() -> None:
    model = Model(lambda mine, given: mine["w"].copy_(given["a"]), w=torch.zeros(3))
    load = RecordedLoad(model.load_weights, lambda: model.mine)
    load.begin()
    load.load([("a", numbers(3))])
    load.finish()
    assert load.begin() is load.recording is not None
    model.mine["w"] = torch.zeros(3)
    assert load.begin() is None


def test_what_recording_needs_is_imported_though_the_default_device_cannot_be_used() -> None:
    with torch.inference_mode(), torch.device("cuda"):
        recorded._warm_up.__wrapped__()
