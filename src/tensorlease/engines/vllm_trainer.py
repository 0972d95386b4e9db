"""The trainer's side of vLLM's weight transfer, as its backend `tensorlease`.

    from tensorlease.engines.vllm_trainer import TensorleaseTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=TensorleaseTrainerInitInfo(rank=rank),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    engine.send_weights()

Importing this makes the backend known to vLLM; there has to be a vLLM.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from tensorlease.agents import RingOptions, RoundResult, TrainerAgent
from tensorlease.agents.ring import DEFAULT_SLOT_BYTES, DEFAULT_SLOTS
from tensorlease.protocol.errors import ClosedError, ConfigError
from tensorlease.protocol.records import Distribution

from .vllm_client import ClientServer
from .vllm_control import VLLMControl
from .vllm_plugin import BACKEND, register
from .vllm_source import has_pieces, pieces, whole


@dataclass
class TensorleaseTrainerInitInfo(TrainerInitInfo):
    """How this rank takes part. All ranks give the same, but for `rank` and `device`."""

    backend: ClassVar[str] = BACKEND
    channel: str = "default"
    """The stream of versions."""
    endpoint: str = ""
    """The broker's address; empty: where agents look by default."""
    distribution: str = "colocated"
    """"colocated": each rank hands whole tensors to the workers on its device. "assembled": workers
    pull what each rank has from all of them: its pieces, where the source gives those."""
    num_ipc_handles: int = DEFAULT_SLOTS
    """Slots of the ring that tensors go through."""
    slot_bytes: int = DEFAULT_SLOT_BYTES
    """Bytes of a slot."""
    timeout: float = 300.0
    """How long an update may take, in seconds."""
    world_size: int | None = None
    """How many ranks there are; default that of torch.distributed, else 1."""
    device: str = ""
    """Label of the rank's device; default the UUID of the current GPU, else `cpu:0`."""
    replica: str = ""
    """What the engine is called in the channel; default its address."""
    workers: int | None = None
    """How many workers the engine has, those of all data-parallel ranks; default: it is asked."""
    recorded: bool = True
    """Whether workers record what the model's loader does, and copy from the second update on."""


class TensorleaseTrainerEngine(TrainerWeightTransferEngine[TensorleaseTrainerInitInfo]):
    """A trainer rank that publishes a `WeightSource`; rank 0 leads the engine as well.

    It is `TrainerAgent` and, on rank 0, `VLLMControl` over the client. It neither pauses the engine
    nor puts it to sleep: that is for whoever calls, as with vLLM's own backends.
    """

    init_info_cls = TensorleaseTrainerInitInfo

    def __init__(
        self, info: TensorleaseTrainerInitInfo, *, client: Any, source: Any, trainer: TrainerAgent
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        self.rank = info.rank
        self.trainer = trainer
        """The agent: its ring, its channel's replicas."""
        self._control: VLLMControl | None = None
        self._version = 0

    @classmethod
    def trainer_init(
        cls, init_info: TensorleaseTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Joins the channel, and has the engine's workers join it; on every rank.

        Raises:
            ConfigError: There is no source, or an argument that cannot work.
            DeadlineError: The engine has not joined in time; says why.
            NoBrokerError: There is no broker.
        """
        if source is None:
            raise ConfigError(f"the backend {BACKEND} publishes a WeightSource: give source=")
        label, ring = _device_of(init_info)
        world_size = init_info.world_size
        if world_size is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            world_size = torch.distributed.get_world_size() if distributed else 1
        trainer = TrainerAgent(
            init_info.channel,
            rank=init_info.rank,
            world_size=world_size,
            endpoint=init_info.endpoint,
            device=label,
            distribution=init_info.distribution,
            ring=RingOptions(init_info.num_ipc_handles, init_info.slot_bytes, device=ring),
        )
        engine = cls(init_info, client=client, source=source, trainer=trainer)
        try:
            engine._join()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def send_weights(self, version: int | None = None) -> RoundResult:
        """Makes a version of what the source has now; on every rank.

        Returns once the engine has it, or the round has failed; the source's memory is free then.

        Args:
            version: Higher than all before; default the next one.

        Raises:
            RoundFailedError: The engine is not at it: it may have half of it, and must not answer
                requests until a later version is sent.
            DeadlineError: It has not ended in time; names who is missing.
            ClosedError: After `shutdown`.
        """
        trainer, info = self.trainer, self._info
        if trainer.closed:
            raise ClosedError(f"{trainer!r} was shut down: make another by trainer_init")
        if version is None:
            version = max(trainer.last_version, self._version) + 1
        self._version = version
        if self._control is not None:
            self._control.wait_ready(trainer, info.timeout)
        regions = None
        with torch.no_grad():
            if trainer.distribution is Distribution.ASSEMBLED and has_pieces(self.source):
                tensors, regions = pieces(self.source, self.rank)
            else:
                tensors = whole(self.source)
            result = trainer.publish_stream(
                version, tensors, regions=regions, timeout=info.timeout, stage_s=info.timeout
            )
        return result.raise_for_status()

    def shutdown(self) -> None:
        """Leaves the channel. Idempotent."""
        control, self._control = self._control, None
        if control is not None:
            control.close()
        self.trainer.close()

    def _join(self) -> None:
        info = self._info
        if not self.is_sender:
            self.trainer.wait_ready(0, info.timeout)
            return
        server = ClientServer(self.client, info.replica, info.workers)
        self._control = VLLMControl(server, update_s=info.timeout, recorded=info.recorded)
        self._control.wait_ready(self.trainer, info.timeout)


def _device_of(info: TensorleaseTrainerInitInfo) -> tuple[str, str]:
    """Returns what this rank says where it is, and where its ring is to lie."""
    if not torch.cuda.is_available():
        return info.device or "cpu:0", "cpu"
    here = f"cuda:{torch.cuda.current_device()}"
    return info.device or here, here


register()
