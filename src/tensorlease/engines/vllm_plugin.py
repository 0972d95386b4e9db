"""What vLLM loads in each of its processes: tells it that there is a backend `tensorlease`."""

from __future__ import annotations

import logging
from importlib import import_module

BACKEND = "tensorlease"
FACTORIES = "vllm.distributed.weight_transfer.factory"
ENGINES = {
    "WeightTransferEngineFactory": ("tensorlease.engines.vllm_engine", "TensorleaseEngine"),
    "WeightTransferTrainerFactory": (
        "tensorlease.engines.vllm_trainer",
        "TensorleaseTrainerEngine",
    ),
}
"""By the factory of vLLM that makes it: module and class, of a worker and of a trainer."""

log = logging.getLogger("tensorlease.engines")


def register() -> None:
    """Registers the name alone; the backend is imported by whoever is asked for it.

    Raises nothing: a vLLM that does not use the backend must start as if this were not here.
    """
    for factory, (module, kind) in ENGINES.items():
        try:
            getattr(import_module(FACTORIES), factory).register_engine(BACKEND, module, kind)
        except Exception as error:  # noqa: BLE001
            # Loaded a second time in this process, or a vLLM without this factory.
            log.debug("%s was not told of the backend %s: %s", factory, BACKEND, error)
