"""vLLM's weight-transfer backend `tensorlease`: a worker that takes versions from a broker.

Runs in vLLM's worker processes. `tensorlease bridge vllm --mode plugin`, or a control client, tells it when a
round begins; the handles come from the broker, without a pickle.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
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

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.agents.given import Given
from tensorlease.agents.recorded import RecordedLoad

from . import vllm_layers
from .ancestors import call_at_end, server_pid
from .complete import Completeness, aliases_of
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
    recorded: bool = True
    """Whether what the model's loader does is recorded, and its copies are repeated without it."""


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
        self._recorded: RecordedLoad | None = None
        # That of the recorded load: there may be a draft model, too.
        self._main = model
        # All that this update brings is copied: no layer is loaded; and all of it is loaded by layers.
        self._copied = self._all_by_layers = False
        # What has come, where all layers are loaded.
        self._complete: Completeness | None = None
        # Workers outlive a server that is killed; they must not keep its seat from a new one.
        call_at_end(server_pid(), self.shutdown)

    @property
    def recorded(self) -> RecordedLoad | None:
        """What is known of the model's loader; None: it is not recorded."""
        return self._recorded

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the channel; again: as another member, the former is closed.

        Raises:
            UpdateError: That is in a round.
        """
        if self._member is not None:
            self._member.require_idle()
        self.shutdown()
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        worker = WorkerAgent(
            init_info.channel,
            replica=init_info.replica,
            member=1 + place,
            size=init_info.size,
            endpoint=init_info.endpoint,
            device=self.device,
        )
        self._recorded = None
        if init_info.recorded:
            self._recorded = RecordedLoad(self._give, self._main, layer_of=_layer_of)
        try:
            self._member = EngineMember(worker, self._load, self._recorded, self._lacking)
        except BaseException:
            worker.close(0.0)
            raise

    def start_weight_update(self) -> None:
        """From now on the model's layers are loaded anew, each as a whole, or copied to."""
        recording = None
        if self._recorded is not None:
            if self.model is self._main:
                recording = self._recorded.begin()
            else:
                self._recorded.skip()
        self._copied = recording is not None and not recording.fallback
        self._all_by_layers = recording is None
        self._complete = None
        if not self._copied:
            vllm_layers.give_up(self.model)  # An update that failed would be loaded with this one.
            aliases = aliases_of(self.model)
            initialize_layerwise_reload(self.model)
            if recording is None and self.model is self._main:
                self._complete = Completeness(self.model, aliases)
        if self._member is not None:
            self._member.begin(copied=self._copied)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads what the round brings; see `EngineMember.receive`."""
        if self._member is None:
            raise UpdateError("/init_weight_transfer_engine has to come before /update_weights")
        self._member.receive(update_info.version, update_info.timeout, self._require_complete)

    def finish_weight_update(self) -> None:
        """All layers are there: what has to be worked out from the weights is."""
        if self._member is not None:
            self._member.end()
        if self._copied:
            return
        recorded = self._recorded
        try:
            with nullcontext() if recorded is None else recorded.watching():
                finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            # Else vLLM would end this update never, and begin no other.
            vllm_layers.give_up(self.model)
            raise
        if recorded is not None:
            recorded.finish()

    def shutdown(self) -> None:
        """Leaves the channel. Idempotent."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _load(self, tensors: Tensors) -> None:
        # Layers keep what they are given until they are complete, perhaps to the end of the update.
        cloned = ((name, tensor.clone()) for name, tensor in tensors)
        if self._recorded is None:
            self._give(cloned)
        else:
            self._recorded.load(cloned)

    def _lacking(self, subset: bool) -> list[str]:
        if self._copied:
            return []
        return vllm_layers.lacking(self.model, whole=self._all_by_layers and not subset)

    def _give(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        model: Any = self.model
        given = Given(tensors)
        try:
            loaded = model.load_weights(given)
        except Exception as error:
            raise UpdateError(f"the engine's {given.said(error)}") from error
        if self._complete is not None:
            self._complete.loaded(loaded)

    def _require_complete(self, info: RoundInfo) -> None:
        """Raises `UpdateError` if layers lack something of what they are made of."""
        if self._complete is None:
            return
        try:
            self._complete.require(subset=info.subset)
        except UpdateError:
            if self._recorded is not None:
                self._recorded.abandon()
            raise


def _layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
