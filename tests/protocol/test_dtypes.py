"""The dtypes that travel."""

from __future__ import annotations

import pytest

from tensorlease.protocol.dtypes import ITEM_SIZES, item_size
from tensorlease.protocol.errors import ProtocolError

torch = pytest.importorskip("torch")


def test_every_dtype_of_torch_with_a_byte_view_travels_and_no_other() -> None:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = {str(dtype).removeprefix("torch."): dtype for dtype in found if "q" not in str(dtype)}
    assert set(plain) <= set(ITEM_SIZES)
    for name, dtype in plain.items():
        assert torch.zeros(16, dtype=torch.uint8).view(dtype).numel() == 16 // item_size(name)
    assert {"qint8", "quint8", "qint32", "quint4x2"}.isdisjoint(ITEM_SIZES)


@pytest.mark.parametrize("name", ["qint8", "torch.float32", "load", "__class__", ""])
def test_a_name_outside_the_list_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="is not one of the dtypes that travel"):
        item_size(name)
