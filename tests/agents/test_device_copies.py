"""Copies on GPUs: how they are shared out, and what is said where there is no driver."""

from __future__ import annotations

import pytest

from tensorlease.agents import cuda_driver
from tensorlease.agents.copying import Run
from tensorlease.agents.cuda_driver import CudaError

pytest.importorskip("torch")

from tensorlease.agents.device_copies import LANES, _shared_out


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 100])
def test_each_copy_is_made_once_and_no_lane_has_much_more_than_another(count: int) -> None:
    runs = [Run(target, target + 10**6, 1000 + 37 * target % 900) for target in range(count)]
    lanes = _shared_out(runs)
    assert sorted(run for lane in lanes for run in lane) == sorted(runs)
    assert len(lanes) == max(1, min(LANES, count))
    loads = [sum(run.nbytes for run in lane) for lane in lanes]
    assert max(loads) - min(loads) <= max((run.nbytes for run in runs), default=0)


def test_without_a_driver_its_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libcuda-is-not-here.so")
    cuda_driver._library.cache_clear()
    with pytest.raises(CudaError, match=r"libcuda-is-not-here\.so: .*cannot open shared object"):
        cuda_driver.uuid_of(0)
    cuda_driver._library.cache_clear()
