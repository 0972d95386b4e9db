"""What a stock vLLM server is sent: by the bytes, and as vLLM's own classes take it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tensorlease.engines import vllm_wire
from tensorlease.engines.vllm_wire import merged, nothing_of, packed, runs, unpacked
from tensorlease.protocol.handles import CUDA_FORMAT, CudaIpcHandle
from tensorlease.protocol.tables import Buffer, TensorEntry

from ..agents.fake_cuda import UUIDS
from .fake_stock_vllm import ALLOWED, parsed, split, unpickled

VLLM = os.environ.get("TENSORLEASE_TEST_VLLM", "")
HANDLE, EVENT = bytes(range(100, 164)), bytes(range(64))


def buffer_of(*entries: TensorEntry, gpu: str = UUIDS[0], begin: int = 512) -> Buffer:
    handle = CudaIpcHandle(CUDA_FORMAT, gpu, HANDLE, 2**21, begin, EVENT)
    end = max(entry.offset + entry.nbytes for entry in entries)
    return Buffer(1, end, handle, list(entries))


def entry(
    name: str, dtype: str, shape: tuple[int, ...], offset: int, alias: str | None = None
) -> TensorEntry:
    return TensorEntry(name, dtype, shape, None, offset, alias)


MIXED = buffer_of(
    entry("a", "bfloat16", (2, 64), 0),
    entry("b", "float32", (64,), 256),
    entry("odd", "float8_e4m3fn", (5,), 512),
    entry("c", "bfloat16", (4,), 768),
    entry("none", "bfloat16", (0, 3), 768),
    entry("scalar", "float32", (), 1024),
    entry("tied", "bfloat16", (2, 64), 0, "a"),
)


def test_arguments_are_those_of_torchs_own_function_by_name_and_type() -> None:
    info = unpacked([MIXED])
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    (arguments,) = info["ipc_handles"][0].values()
    given = dict(zip(names, arguments, strict=True))
    assert given["tensor_cls"] is torch.Tensor
    assert given["tensor_size"] == torch.Size((2, 64))
    assert given["tensor_stride"] == (64, 1)
    assert given["storage_cls"] is torch.storage.TypedStorage
    assert given["dtype"] is torch.bfloat16
    assert given["storage_handle"] == b"\x01c" + HANDLE
    assert (given["storage_offset_bytes"], given["storage_size_bytes"]) == (512, 256)
    assert (given["event_handle"], given["event_sync_required"]) == (EVENT, True)
    assert not Path(f"/dev/shm{given['ref_counter_handle'].decode()}").exists()
    assert list(info["ipc_handles"][0]) == [UUIDS[0]]


def test_the_event_is_waited_for_once_for_each_and_before_all_else() -> None:
    info = unpacked([MIXED])
    waits = [next(iter(each.values()))[14] for each in info["ipc_handles"]]
    assert waits == [True] + [False] * 6


def test_runs_end_where_bytes_are_left_out_or_would_not_be_aligned() -> None:
    tight = buffer_of(
        entry("x", "uint8", (2,), 2),
        entry("y", "float32", (1,), 4),
        entry("z", "float32", (1,), 8),
    )
    found = [[e.name for e in run.entries] for run in runs([MIXED, tight], 2**20)]
    assert found == [["none", "a", "b", "odd"], ["c"], ["scalar"], ["tied"], ["x"], ["y", "z"]]
    assert [[e.name for e in run.entries] for run in runs([MIXED], 300)] == [
        ["none", "a"],
        ["b", "odd"],
        ["c"],
        ["scalar"],
        ["tied"],
    ]


def test_what_is_between_two_calls_of_one_buffer_begins_elsewhere() -> None:
    run = runs([MIXED], 2**20)[0]
    (before,), (between,) = (
        packed(run)["ipc_handles"].values(),
        nothing_of(run)["ipc_handles"].values(),
    )
    assert before[9] != between[9]
    assert nothing_of(run)["names"] == nothing_of(run)["tensor_sizes"] == []


def test_one_body_for_all_gpus_has_each_ones_handle() -> None:
    infos = [unpacked([buffer_of(*MIXED.entries, gpu=gpu)]) for gpu in UUIDS[:2]]
    one = merged(infos)
    assert isinstance(one, dict)
    assert all(list(each) == list(UUIDS[:2]) for each in parsed(one)["ipc_handles"])
    infos[1]["names"][0] = "another"
    many = merged(infos)
    assert isinstance(many, list)
    assert [parsed(info)["names"][0] for info in many] == ["a", "another"]


def test_the_module_reads_no_pickle_and_writes_names_of_torch_alone() -> None:
    tree = ast.parse(inspect.getsource(vllm_wire))
    calls = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert "dumps" in calls
    assert not calls & {"loads", "load", "Unpickler"}
    body = merged([unpacked([MIXED])])
    assert isinstance(body, dict)
    assert len(unpickled(body["ipc_handles_pickled"])) == 7
    assert {module.partition(".")[0] for module, _ in ALLOWED} == {"torch"}


def bodies() -> list[tuple[bool, dict[str, Any]]]:
    """Good and bad bodies, with whether they are for a packed server."""
    good = [(True, merged([packed(run)])) for run in runs([MIXED], 2**20)]
    good.append((True, merged([nothing_of(runs([MIXED], 2**20)[0])])))
    good.append((False, merged([unpacked([MIXED])])))
    made = [(mode, dict(body)) for mode, body in good if isinstance(body, dict)]
    first, whole = made[0][1], made[-1][1]
    elsewhere = merged([unpacked([buffer_of(*MIXED.entries, gpu=UUIDS[1])])])
    assert isinstance(elsewhere, dict)
    bad = [
        (False, {**whole, "names": whole["names"][1:]}),
        (False, {**whole, "dtype_names": whole["dtype_names"][1:]}),
        (False, {**whole, "shapes": whole["shapes"][1:]}),
        (False, {**whole, "ipc_handles_pickled": None}),
        (False, {**whole, "packed": False}),
        (False, {k: v for k, v in whole.items() if k != "names"}),
        (False, elsewhere),
        (True, {k: v for k, v in first.items() if k != "tensor_sizes"}),
        (True, {**first, "tensor_sizes": [*first["tensor_sizes"][:-1], 10**6]}),
        (True, {**first, "shapes": [[9], *first["shapes"][1:]]}),
    ]
    return made + bad


def of_the_fake(mode: bool, info: dict[str, Any]) -> dict[str, str]:
    """Returns what the fake server makes of a body; see `stock_vllm_says`."""
    try:
        read = parsed(info)
        handles = read["ipc_handles"]
        if mode and read.get("tensor_sizes") is None:
            raise ValueError("`tensor_sizes` is required when packed=True")
        for each in [handles] if mode else handles:
            if UUIDS[0] not in each:
                raise ValueError(f"IPC handle not found for GPU UUID {UUIDS[0]}.")
        if mode:
            tensors = split(_content(handles[UUIDS[0]]), read)
        else:
            tensors = [
                (name, _content(each[UUIDS[0]]))
                for name, each in zip(read["names"], handles, strict=True)
            ]
    except Exception as error:  # noqa: BLE001
        return {"error": type(error).__name__, "text": str(error)}
    return {
        name: hashlib.sha256(bytes(t.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()
        for name, t in tensors
    }


def _content(arguments: tuple[Any, ...]) -> torch.Tensor:
    content = torch.arange(arguments[8]).remainder(251).to(torch.uint8)
    made = torch.empty(0, dtype=arguments[5])
    return made.set_(content.untyped_storage(), arguments[3], arguments[1], arguments[2])


@pytest.mark.skipif(not VLLM, reason="needs a vLLM: `make vllm` installs one and runs this")
@pytest.mark.timeout(300)
def test_vllms_own_classes_and_the_fake_server_take_and_refuse_the_same() -> None:
    script = Path(__file__).with_name("stock_vllm_says.py")
    done = subprocess.run(
        [f"{VLLM}/bin/python", str(script), UUIDS[0]],
        input=json.dumps(bodies()),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for (mode, info), real in zip(bodies(), said, strict=True):
        fake = of_the_fake(mode, info)
        assert fake.get("error") == real.get("error"), (info, fake, real)
        if "error" not in real:
            assert fake == real
        elif "`" in real["text"]:
            assert real["text"].split(":")[0] in fake["text"]
    assert sum("error" in each for each in said) == 10
