"""Which dtypes become which, and that the parts of a conversion make up the whole."""

from __future__ import annotations

import pytest
import torch

from tensorlease.agents import casting
from tensorlease.agents.casting import convert, parts_of, why_not

CPU = torch.device("cpu")
FLOATING = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("target", FLOATING)
@pytest.mark.parametrize("source", FLOATING)
def test_every_floating_dtype_becomes_every_other(source: torch.dtype, target: torch.dtype) -> None:
    assert why_not(source, target, CPU) == ""
    given = torch.tensor([0.5, -2.0, 0.0]).to(source)
    made = torch.empty(3, dtype=target)
    convert(made, given)
    assert made.to(torch.float32).tolist() == [0.5, -2.0, 0.0]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (torch.int64, torch.float32, "one is integer, the other floating"),
        (torch.float32, torch.int8, "one is floating, the other integer"),
        (torch.complex64, torch.float32, "one is complex, the other floating"),
        (torch.bool, torch.uint8, "one is bool, the other integer"),
        (torch.int64, torch.int32, "it does not hold all values"),
        (torch.int8, torch.uint64, "it does not hold all values"),
        (torch.uint8, torch.int8, "it does not hold all values"),
        (torch.float32, torch.float4_e2m1fn_x2, "has no conversion between the two"),
        (torch.bits8, torch.uint8, "one is bits8, the other integer"),
    ],
)
def test_what_would_lose_its_kind_or_values_is_refused(
    source: torch.dtype, target: torch.dtype, reason: str
) -> None:
    assert reason in why_not(source, target, CPU)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int8, torch.int64),
        (torch.uint8, torch.int16),
        (torch.complex64, torch.complex128),
        (torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2),
        (torch.bits8, torch.bits8),
    ],
)
def test_wider_and_equal_dtypes_are_fine(source: torch.dtype, target: torch.dtype) -> None:
    assert why_not(source, target, CPU) == ""


@pytest.mark.parametrize("shape", [(1000,), (10, 100), (1, 1, 1000), (2, 500), (7, 11, 13), (3,)])
def test_parts_of_bounded_size_make_up_the_whole(shape: tuple[int, ...]) -> None:
    source = torch.rand(shape)
    target = torch.zeros(shape[::-1], dtype=torch.bfloat16).permute(*reversed(range(len(shape))))
    sizes: list[int] = []
    for target_part, source_part in parts_of(target, source, 400):
        target_part.copy_(source_part)
        sizes.append(source_part.numel() * source_part.element_size())
    assert sum(sizes) == source.numel() * 4
    assert max(sizes) <= 400
    assert len(sizes) <= 2 * (sum(sizes) // 400 + 1) or len(shape) == 3
    assert target.equal(source.to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_on_a_gpu_is_converted_with_no_tensor_of_full_size(dtype: torch.dtype) -> None:
    source = torch.rand(64, 2**20, device="cuda").t()
    target = torch.empty(source.shape, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    convert(target, source)
    assert torch.cuda.max_memory_allocated() - before <= 2 * casting.PART_BYTES
    assert target.equal(source.cpu().to(dtype))
