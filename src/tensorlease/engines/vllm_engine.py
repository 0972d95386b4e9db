"""vLLM's weight-transfer backend `tensorlease`: a worker that takes versions from a broker.

Runs in vLLM's worker processes. `tensorlease bridge vllm`, or a control client, tells it when a
round begins; the handles come from the broker, without a pickle.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tensorlease.agents import WorkerAgent

from .ancestors import call_at_end, server_pid
from .member import EngineMember, Tensors, UpdateError


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The body of `/init_weight_transfer_engine`."""

    channel: str
    replica: str
    """All of the server's processes, and who leads them as member 0, are one replica."""
    size: int
    """Its members."""
    endpoint: str = ""
    """The broker's address; empty: where agents look by default."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The body of `/update_weights`."""

    version: int
    timeout: float = 300.0
    """Limit in seconds."""


class TensorleaseEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The seat of one of vLLM's workers in its server's replica."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._member: EngineMember | None = None
        # Workers outlive a server that is killed; they must not keep its seat from a new one.
        call_at_end(server_pid(), self.shutdown)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the channel; again: as another member, the former is closed."""
        self.shutdown()
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        worker = WorkerAgent(
            init_info.channel,
            replica=init_info.replica,
            member=1 + place,
            size=init_info.size,
            endpoint=init_info.endpoint,
            device=label_of(self.device),
        )
        try:
            self._member = EngineMember(worker, self._load)
        except BaseException:
            worker.close(0.0)
            raise

    def start_weight_update(self) -> None:
        """From now on the model's layers are loaded anew, each as a whole."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads what the round brings; see `EngineMember.receive`."""
        if self._member is None:
            raise UpdateError("/init_weight_transfer_engine has to come before /update_weights")
        self._member.receive(update_info.version, update_info.timeout)

    def finish_weight_update(self) -> None:
        """All layers are there: what has to be worked out from the weights is."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the channel. Idempotent."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _load(self, tensors: Tensors) -> None:
        model: Any = self.model
        # Layers keep what they are given until they are complete, perhaps to the end of the update.
        model.load_weights([(name, tensor.clone()) for name, tensor in tensors])


def label_of(device: torch.device) -> str:
    """Returns what trainers on the same device call it: its UUID, or `cpu:0`."""
    if device.type != "cuda":
        return "cpu:0"
    return str(torch.cuda.get_device_properties(device).uuid).lower()
