"""Run by a vLLM's own Python: what its classes make of bodies of `/update_weights`.

Reads a list of `update_info`s as JSON, with `packed` beside; writes for each what vLLM raises, or
names and digests of the tensors that come of a packed buffer whose n-th byte is n modulo 251.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
out, sys.stdout = sys.stdout, sys.stderr  # What vLLM logs is no answer.

import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

GPU = sys.argv[1]
of_gpus: Any = torch.cuda
of_gpus.get_device_properties = lambda _: SimpleNamespace(uuid=GPU)


def rebuild(*arguments: Any) -> torch.Tensor:
    """Stands for what needs a GPU: torch's rebuilding of an opened handle."""
    size, stride, offset, dtype = arguments[1], arguments[2], arguments[3], arguments[5]
    content = torch.arange(arguments[8]).remainder(251).to(torch.uint8)
    made = torch.empty(0, dtype=dtype)
    return made.set_(content.untyped_storage(), offset, size, stride)


reductions.rebuild_cuda_tensor = ipc_engine.rebuild_cuda_tensor = rebuild
answers: list[dict[str, str]] = []
for packed, info in json.load(sys.stdin):
    loaded: list[tuple[str, torch.Tensor]] = []
    engine = ipc_engine.IPCWeightTransferEngine.__new__(ipc_engine.IPCWeightTransferEngine)
    engine.device, engine.packed = torch.device("cuda", 0), packed
    engine.model = SimpleNamespace(load_weights=loaded.extend)
    engine._packed_importer = packed_tensor.PackedBufferImporter()
    try:
        engine.receive_weights(engine.parse_update_info(info))
    except Exception as error:  # noqa: BLE001
        answers.append({"error": type(error).__name__, "text": str(error)})
        continue
    answers.append(
        {
            name: hashlib.sha256(
                bytes(t.contiguous().view(-1).view(torch.uint8).tolist())
            ).hexdigest()
            for name, t in loaded
        }
    )
json.dump(answers, out)
