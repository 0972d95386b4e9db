"""GPU memory that CUDA IPC cannot share, on a real GPU: named, and handed over by staging or shm."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tensorlease.agents import GpuMemoryError, NotSharedError, TrainerAgent

from ..broker.raw_agents import Threaded, eventually
from ..procs import Spawn
from .test_cuda import MIB, follower, model, shapes_of, take

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

EXPANDABLE = """
import json, sys, torch
from tensorlease.agents import ExportError, RingOptions, TrainerAgent

url = sys.argv[1]
sent = {"w": torch.zeros(3 * 2**20, device="cuda"), "b": torch.zeros(7, device="cuda").bfloat16()}
said = []
with TrainerAgent("policy", endpoint=url, ring=RingOptions(2, 2**20, device="cuda:0")) as trainer:
    try:
        trainer.register(sent)
    except ExportError as error:
        said.append(str(error))
    for version, share in enumerate(["auto", "staging", "shm"], start=1):
        buffers = trainer.register(sent, share=share)
        trainer.wait_ready(1, 30.0)
        torch.cuda._sleep(100_000_000)
        for tensor in sent.values():
            tensor.fill_(version)
        said.append([buffers.via, trainer.publish(version).raise_for_status().via[0]])
        trainer.unregister(buffers, 20.0)
    trainer.wait_ready(1, 30.0)
    said.append(trainer.publish_stream(4, sent).raise_for_status().via[0])
print(json.dumps(said))
"""


def filled(version: int) -> dict[str, Tensor]:
    return {
        "w": torch.full((3 * MIB,), float(version), device="cuda"),
        "b": torch.full((7,), float(version), device="cuda").bfloat16(),
    }


def test_expandable_segments_are_named_and_go_by_staging_or_shm_where_that_was_chosen(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    process = spawn(follower, url, shapes_of(filled(0)), "a")
    assert process.hear() == "attached"
    trainer = subprocess.Popen(
        [sys.executable, "-P", "-c", EXPANDABLE, url],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for version in (1, 2, 3):
            take(process, version, filled(version))
        # The ring has sent what was there last.
        take(process, 4, filled(3), "end")
        out, _ = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        trainer.wait()
    text, auto, staging, shm, ring = json.loads(out)
    assert text.startswith("tensor 'w' lies in GPU memory that CUDA IPC cannot share (")
    assert "it belongs to one of torch's expandable segments" in text and 'share="auto"' in text
    assert auto == staging == [["staging"], ["staging"]]
    assert shm == [["shm"], ["shm"]]
    assert ring == ["ipc"]


@pytest.mark.parametrize("share", ["staging", "shm"])
@pytest.mark.parametrize("verify", [False, True])
def test_what_is_copied_first_is_equal_to_its_source_in_another_process(
    broker: Threaded, url: str, spawn: Spawn, share: str, verify: bool
) -> None:
    sent = model()
    sent["transposed"] = torch.randn(129, 65, device="cuda").T
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent, share=share)
        # What is on the CPU, or has no bytes, is in shared memory in any case.
        via = ("shm", "staging") if share == "staging" else ("shm",)
        assert buffers.via == via
        trainer.wait_ready(1, 30.0)
        for version in range(1, 6):
            for name, tensor in model(version).items():
                sent[name].copy_(tensor)
            torch.cuda._sleep(100_000_000)
            sent["large"].add_(1)
            handle = trainer.publish_nowait(version, verify=verify)
            expected = {name: tensor.clone() for name, tensor in sent.items()}
            sent["large"].fill_(-1)  # At once: the copies are made.
            assert handle.result(20.0).raise_for_status().via == {0: via}
            take(process, version, expected, "end" if version == 5 else "go on")


def test_staging_is_given_back_when_it_is_unregistered(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = {"w": torch.ones(256 * MIB // 4, device="cuda")}
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent, share="staging")
        trainer.wait_ready(1, 30.0)
        trainer.publish(1).raise_for_status()
        take(process, 1, sent)
        held, _ = torch.cuda.mem_get_info()
        assert held <= before - 256 * MIB
        trainer.unregister(buffers, 20.0)
        del buffers
        eventually(lambda: torch.cuda.mem_get_info()[0] >= held + 250 * MIB)


def test_another_dtype_is_made_on_the_gpu_with_staging(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    sent = {"w": torch.randn(300, 200, device="cuda")}
    expected = {"w": sent["w"].bfloat16()}
    process = spawn(follower, url, shapes_of(expected), "a")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url) as trainer:
        buffers = trainer.register(sent, dtype=torch.bfloat16, share="staging")
        assert buffers.via == ("staging",)
        trainer.wait_ready(1, 30.0)
        trainer.publish(1).raise_for_status()
        take(process, 1, expected, "end")


def test_without_room_for_staging_the_tensor_and_what_is_free_are_named(
    broker: Threaded, url: str
) -> None:
    whole = torch.cuda.mem_get_info()[1]
    # One element, seen as often as the GPU has bytes: its copy would need them all.
    sent = {"w": torch.ones(1, dtype=torch.uint8, device="cuda").expand(whole)}
    refused = pytest.raises(GpuMemoryError, match="tensor 'w': .* there is no room .*MiB")
    with TrainerAgent("policy", endpoint=url) as trainer, refused:
        trainer.register(sent, share="staging")


POOLED = """
import sys, torch
from tensorlease.agents import ExportError, TrainerAgent

with TrainerAgent("policy", endpoint=sys.argv[1]) as trainer:
    w = torch.ones(3 * 2**20, device="cuda")
    try:
        trainer.register({"w": w})
    except ExportError as error:
        print(error)
    print(*trainer.register({"w": w}, share="auto").via)
"""


def test_memory_of_a_stream_ordered_pool_is_named_and_staged(broker: Threaded, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", POOLED, url],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, via = done.stdout.splitlines()
    assert "it comes from a stream-ordered memory pool (cudaMallocAsync)" in said
    assert via == "staging"


def pooled_trainer(url: str) -> list[str]:
    """In a child: registers a tensor of a torch.cuda.MemPool with an allocator of its own."""
    library = ctypes.CDLL("libcuda.so.1")

    def allocate(nbytes: int, device: int, stream: int | None) -> int | None:
        made = ctypes.c_uint64()
        library.cuMemAllocAsync(
            ctypes.byref(made), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        )
        return made.value

    def free(memory: int, nbytes: int, device: int, stream: int | None) -> None:
        library.cuMemFreeAsync(ctypes.c_uint64(memory), ctypes.c_void_p(stream))

    pointer, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
    calls = (
        ctypes.CFUNCTYPE(pointer, size, number, pointer)(allocate),
        ctypes.CFUNCTYPE(None, pointer, size, number, pointer)(free),
    )
    addresses = [ctypes.cast(call, pointer).value for call in calls]
    pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*addresses))
    with torch.cuda.use_mem_pool(pool):
        weight = torch.ones(3 * MIB, device="cuda")
    with TrainerAgent("policy", endpoint=url) as trainer:
        said: list[str] = []
        try:
            trainer.register({"w": weight})
        except NotSharedError as error:
            said.append(str(error))
        said += trainer.register({"w": weight}, share="auto").via
    del weight, pool  # While there is a Python that can be called to give it back.
    return said


def test_a_pool_with_an_allocator_of_its_own_is_named_and_staged(
    broker: Threaded, url: str, spawn: Spawn
) -> None:
    text, via = spawn(pooled_trainer, url).result(60.0)
    assert "lies in GPU memory that CUDA IPC cannot share" in text and "pool" in text
    assert via == "staging"


def test_auto_copies_nothing_where_ipc_works(broker: Threaded, url: str, spawn: Spawn) -> None:
    sent = {"w": torch.ones(100, device="cuda")}
    process = spawn(follower, url, shapes_of(sent), "a")
    assert process.hear() == "attached"
    with TrainerAgent("policy", endpoint=url) as trainer:
        trainer.register(sent, share="auto")
        trainer.wait_ready(1, 30.0)
        assert trainer.publish(1).raise_for_status().via == {0: ("ipc",)}
        take(process, 1, sent, "end")
