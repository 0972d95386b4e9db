"""What vLLM loads in each of its processes: tells it that there is a backend `tensorlease`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging

BACKEND = "tensorlease"

log = logging.getLogger("tensorlease.engines")


def register() -> None:
    """Registers the name alone; the backend is imported by the worker that is asked for it.

    Raises nothing: a vLLM that does not use the backend must start as if this were not here.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(
            BACKEND, "tensorlease.engines.vllm_engine", "TensorleaseEngine"
        )
    except Exception as error:  # noqa: BLE001
        # Loaded a second time in this process, or a vLLM without these factories.
        log.debug("vLLM was not told of the backend %s: %s", BACKEND, error)
