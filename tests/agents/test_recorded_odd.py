"""Loaders that do odd things: the next round is what they would have made of it, by whichever way."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tensorlease.agents.recorded import RecordedLoad

from .test_recorded import Model, copy, numbers

torch = pytest.importorskip("torch")

Named = dict[str, Any]
Load = Callable[[Named, Named], object]


def require_same(load: Load, parameters: Named, *rounds: Named) -> RecordedLoad:
    """Asserts that each round sets what the loader alone, of a fresh model, sets in as many."""
    ours, plain = (
        Model(load, **{name: tensor.clone() for name, tensor in parameters.items()})
        for _ in range(2)
    )
    recorded = RecordedLoad(ours.load_weights, lambda: ours.mine)
    for number, given in enumerate(rounds):
        plain.load_weights((name, tensor.clone()) for name, tensor in given.items())
        recording = recorded.begin()
        if recording is not None and recording.boxes is not None:
            copy(recording, given)
        left = [n for n in given if recording is None or n in recording.fallback]
        if left:
            recorded.load((name, given[name].clone()) for name in left)
        recorded.finish()
        for name, tensor in plain.mine.items():
            assert torch.equal(ours.mine[name], tensor), f"{name}, round {number + 1}"
    return recorded


def test_a_tensor_that_is_copied_twice_to_places_that_overlap() -> None:
    def load(mine: Named, given: Named) -> None:
        mine["w"].copy_(given["a"])
        mine["w"][0].copy_(given["a"][1])

    a = numbers(4)
    recorded = require_same(load, {"w": torch.zeros(4), "v": torch.zeros(4)}, {"a": a}, {"a": -a})
    assert "something else is written" in recorded.fallback["a"]

    def again(mine: Named, given: Named) -> None:
        for _ in range(2):
            mine["w"].copy_(given["a"])

    assert not require_same(again, {"w": torch.zeros(4)}, {"a": a}, {"a": -a}).fallback


def test_a_tensor_whose_place_elsewhere_is_overlapped() -> None:
    def load(mine: Named, given: Named) -> None:
        mine["w"].copy_(given["a"])
        mine["v"].copy_(given["a"])
        mine["v"][0].copy_(given["a"][1])

    a = numbers(4)
    require_same(load, {"w": torch.zeros(4), "v": torch.zeros(4)}, {"a": a}, {"a": -a})


def test_a_tensor_of_the_loader_of_which_a_part_is_written_over() -> None:
    def load(mine: Named, given: Named) -> None:
        joined = torch.cat([given["a"], given["a"]])
        joined[3:5].copy_(given["a"][:2])
        mine["w"].copy_(joined[:3])

    a = numbers(4)
    require_same(load, {"w": torch.zeros(3)}, {"a": a}, {"a": -a})


def test_a_conjugate_that_torch_makes_when_it_copies() -> None:
    def load(mine: Named, given: Named) -> None:
        mine["w"].copy_(given["a"].conj())

    a = torch.complex(numbers(4), numbers(4))
    zeros = torch.zeros(4, dtype=torch.complex64)
    assert require_same(load, {"w": zeros}, {"a": a}, {"a": a * 3}).fallback.keys() == {"a"}


@pytest.mark.parametrize("part", [False, True])
def test_a_source_that_the_loader_writes_to(part: bool) -> None:
    def load(mine: Named, given: Named) -> None:
        if part:
            given["a"][0].copy_(given["a"][1])
        else:
            given["a"][0] = 7.0
        mine["w"].copy_(given["a"])

    a = numbers(4)
    recorded = require_same(load, {"w": torch.zeros(4)}, {"a": a}, {"a": -a})
    assert "writes to it" in recorded.fallback["a"]


def test_what_a_parameter_had_before() -> None:
    def keep(mine: Named, given: Named) -> None:
        mine["former"].copy_(mine["w"])
        mine["w"].copy_(given["a"])

    def count(mine: Named, given: Named) -> None:
        mine["w"].copy_(given["a"])
        mine["former"].add_(1)

    def shift(mine: Named, given: Named) -> None:
        mine["former"][1].copy_(mine["former"][0])
        mine["former"][0].copy_(given["a"][0])

    parameters, a = {"w": torch.zeros(4), "former": torch.zeros(4)}, numbers(4)
    for load in (keep, count, shift):
        recorded = require_same(load, parameters, {"a": a}, {"a": -a}, {"a": a})
        assert "had before" in recorded.fallback["a"]


def _branch(mine: Named, given: Named) -> None:
    mine["w" if given["which"] > 1 else "v"].copy_(given["a"])


def _number(mine: Named, given: Named) -> None:
    mine["w" if given["which"].item() > 1 else "v"].copy_(given["a"])


def _index(mine: Named, given: Named) -> None:
    mine["w"][int(given["which"]) :][:1].copy_(given["a"][:1])


def _same(mine: Named, given: Named) -> None:
    mine["w" if torch.equal(given["which"], torch.tensor([2.0])) else "v"].copy_(given["a"])


def _skips(mine: Named, given: Named) -> None:
    if given["which"].tolist() == [2.0]:
        mine["w"].copy_(given["a"])


@pytest.mark.parametrize("load", [_branch, _number, _index, _same, _skips])
def test_values_that_say_what_becomes_of_other_tensors(load: Load) -> None:
    def given(which: float, factor: int) -> Named:
        return {"which": torch.tensor([which]), "a": numbers(4) * factor}

    parameters = {"w": torch.zeros(4), "v": torch.zeros(4)}
    recorded = require_same(load, parameters, given(1.0, 1), given(2.0, 2), given(1.0, 3))
    assert "may depend on the values of which" in recorded.fallback["a"]


def test_a_number_that_is_only_written_leaves_the_others_alone() -> None:
    def load(mine: Named, given: Named) -> None:
        if "scalar" in given:
            mine["w"].fill_(given["scalar"].item())
        if "a" in given:
            mine["v"].copy_(given["a"])

    a, s = numbers(4), torch.tensor([3.0])
    parameters = {"w": torch.zeros(1), "v": torch.zeros(4)}
    recorded = require_same(load, parameters, {"scalar": s, "a": a}, {"scalar": -s, "a": -a})
    assert recorded.fallback.keys() == {"scalar"}


def test_copies_of_another_thread() -> None:
    def load(mine: Named, given: Named) -> None:
        thread = threading.Thread(target=lambda: mine["w"].copy_(given["a"]))
        thread.start()
        thread.join()

    a = numbers(4)
    recorded = require_same(load, {"w": torch.zeros(4)}, {"a": a}, {"a": -a})
    assert "cannot be seen" in recorded.fallback["a"]


def test_a_file_that_the_loader_writes_and_reads() -> None:
    def load(mine: Named, given: Named) -> None:
        file = io.BytesIO()
        torch.save(given["a"], file)
        file.seek(0)
        mine["w"].copy_(torch.load(file))

    a = numbers(4)
    require_same(load, {"w": torch.zeros(4)}, {"a": a}, {"a": -a})


def test_an_array_that_is_kept_beside_a_parameter() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(4, dtype="float32")

    def load(mine: Named, given: Named) -> None:
        mine["w"].copy_(given["a"])
        torch.from_numpy(array).copy_(given["a"])

    a = numbers(4)
    recorded = require_same(load, {"w": torch.zeros(4)}, {"a": a}, {"a": -a})
    assert recorded.fallback.keys() == {"a"}
    assert array.tolist() == [-1, -2, -3, -4]


def test_a_loader_that_clears_all_before_it_loads() -> None:
    def load(mine: Named, given: Named) -> None:
        for parameter in mine.values():
            parameter.zero_()
        if "a" in given:
            mine["w"].copy_(given["a"])
        if "b" in given:
            mine["v"].copy_(given["b"] * 2)

    a = numbers(4)
    parameters = {"w": torch.zeros(4), "v": torch.zeros(4)}
    recorded = require_same(load, parameters, {"a": a, "b": a}, {"a": -a, "b": -a})
    assert recorded.fallback.keys() == {"a", "b"}


def wrapped(inner: Any) -> Any:
    """A tensor that has its values in another, as those of quantising libraries."""

    class Wrapped(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = [each.inner if isinstance(each, Wrapped) else each for each in args]
            func(*plain, **(kwargs or {}))
            return args[0]

    made = torch.Tensor._make_wrapper_subclass(Wrapped, inner.shape, dtype=inner.dtype)
    made.inner = inner
    return made


def test_a_parameter_that_is_no_plain_tensor() -> None:
    model = Model(lambda mine, given: mine["w"].copy_(given["a"]), w=wrapped(torch.zeros(4)))
    recorded = RecordedLoad(model.load_weights, lambda: model.mine)
    assert recorded.begin() is None
    recorded.load([("a", numbers(4))])
    recorded.finish()
    assert "no plain one" in recorded.fallback["a"]
    assert recorded.begin() is recorded.recording
    assert torch.equal(model.mine["w"].inner, numbers(4))
