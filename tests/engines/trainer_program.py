"""Run by a vLLM's Python: a rank of an FSDP2 trainer sends its weights by vLLM's own interfaces.

Differs from vLLM's published script for several ranks by its init info alone. Prints, as JSON, the
versions that were sent and what the last one held.

    python trainer_program.py ENDPOINT URL RANK RANKS DISTRIBUTION RENDEZVOUS
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def main(endpoint: str, url: str, place: str, ranks: str, how: str, rendezvous: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from tensorlease.engines.vllm_plugin import register
    from tensorlease.engines.vllm_trainer import TensorleaseTrainerInitInfo

    register()  # As vLLM's own plugins may: it is known already.
    rank, world_size = int(place), int(ranks)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5))
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=TensorleaseTrainerInitInfo(
            rank=rank, channel="policy", endpoint=endpoint, distribution=how, timeout=60.0
        ),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    versions, sent = [], {}
    for step in (1.0, 2.0):
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(step + number)
        versions.append(engine.send_weights().version)
        for name, parameter in model.named_parameters():
            gathered: Any = parameter
            sent[name] = (gathered.full_tensor() if world_size > 1 else gathered).tolist()
    engine.shutdown()
    engine.shutdown()
    if world_size > 1:
        dist.destroy_process_group()
    sys.stdout.write(json.dumps({"versions": versions, "sent": sent}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
