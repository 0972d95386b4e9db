"""Digests: every byte counts, and every device finds the same."""

from __future__ import annotations

import itertools
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents.errors import VerifyError
from tensorlease.protocol.errors import ProtocolError
from tensorlease.protocol.records import Proof
from tensorlease.protocol.tables import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")


def random_bytes(count: int) -> Tensor:
    made: Tensor = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return made


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1001])
def test_a_digest_is_what_the_protocol_says(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from tensorlease.agents import digests

    monkeypatch.setattr(digests, "PART_BYTES", 100)
    data = random_bytes(count)
    assert digests.digest_of(data) == sha256(bytes(data.tolist())).digest()[:16]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64", "int32", "int8"])
def test_numbers_that_are_negated_or_constant_have_other_digests(dtype: str) -> None:
    from tensorlease.agents.digests import digest_of

    kind = getattr(torch, dtype)
    values = torch.randint(1, 100, (1024,)).to(kind)
    halves = values.clone()
    halves[::2].neg_()
    tensors = [values, -values, halves, *(torch.full((2**16,), n).to(kind) for n in range(9))]
    assert len({digest_of(t.view(torch.uint8)) for t in tensors}) == len(tensors)


def test_each_byte_and_each_place_counts() -> None:
    from tensorlease.agents.digests import digest_of

    data = random_bytes(67)
    seen = {digest_of(data)}
    for place in range(67):
        for bit in (0, 7):
            other = data.clone()
            other[place] ^= 1 << bit
            seen.add(digest_of(other))
    assert len(seen) == 1 + 67 * 2
    ones, moved = torch.zeros(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    ones[0], moved[8] = 1, 1
    assert len({digest_of(t) for t in (ones, moved, ones[:16], ones[:9])}) == 4


def test_it_does_not_matter_where_the_bytes_lie() -> None:
    from tensorlease.agents.digests import digest_of

    data = random_bytes(100)
    for shift in range(9):
        memory = random_bytes(120)
        memory[shift : shift + 100] = data
        assert digest_of(memory[shift : shift + 100]) == digest_of(data)


def test_a_tensor_with_other_bytes_is_named_and_no_tag_tells_the_proof() -> None:
    from tensorlease.agents.digests import digest_buffer, read_buffer

    entries = [
        TensorEntry("first", "float32", (4,), None, 0),
        TensorEntry("second", "bfloat16", (3,), None, 256),
        TensorEntry("tied", "bfloat16", (3,), None, 256, "second"),
        TensorEntry("empty", "int8", (0, 5), None, 0),
    ]
    data = random_bytes(300)
    tags, proof = digest_buffer(7, entries, data)
    assert (len(tags), proof.buffer) == (8 * 4, 7)
    assert read_buffer(7, entries, data, tags) == proof
    assert proof.digest not in [tags[at : at + 8] for at in range(0, 32, 8)]
    between = data.clone()
    between[100] ^= 1  # between the tensors, where nothing lies
    assert read_buffer(7, entries, between, tags) == proof
    data[257] ^= 128
    with pytest.raises(VerifyError, match="tensor 'second' has other bytes in buffer 7"):
        read_buffer(7, entries, data, tags)
    with pytest.raises(ProtocolError, match="24 bytes of tags for 4 tensors"):
        read_buffer(7, entries, data, tags[8:])


def test_the_proof_is_of_all_of_the_buffer() -> None:
    from tensorlease.agents.digests import digest_buffer

    entries = [TensorEntry(f"t{n}", "uint8", (16,), None, 16 * n) for n in range(4)]
    data = random_bytes(64)
    proofs: set[Proof] = set()
    for places in itertools.chain([()], ((p,) for p in range(64))):
        changed = data.clone()
        for place in places:
            changed[place] ^= 1
        proofs.add(digest_buffer(0, entries, changed)[1])
    assert len(proofs) == 65


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    from tensorlease.agents.digests import digest_of

    data = random_bytes(9 * 2**20 + 5)
    assert digest_of(data.cuda()) == digest_of(data)
