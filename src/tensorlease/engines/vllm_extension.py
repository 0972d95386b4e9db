"""For vLLM versions without weight-transfer backends: their workers take versions by these methods.

    vllm serve MODEL --worker-extension-cls tensorlease.engines.vllm_extension.WorkerExtension

Each is called in all workers by vLLM's `collective_rpc`, which is how it is told of a round; what
comes over HTTP is text.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tensorlease.agents import RoundInfo, WorkerAgent
from tensorlease.agents.given import Given
from tensorlease.protocol.errors import ConfigError

from . import vllm_layers
from .ancestors import call_at_end, server_pid
from .complete import Completeness, aliases_of
from .member import EngineMember, Finish, Tensors, UpdateError

if TYPE_CHECKING:
    import torch


class WorkerExtension:
    """A base that vLLM adds to its worker's; no name of it is one of vLLM's worker.

    All of an engine's workers are one replica, without a leader: it is for whoever calls to hold the
    engine's requests meanwhile, and to reset its prefix cache.
    """

    # Of vLLM's worker.
    device: torch.device
    model_runner: Any
    vllm_config: Any
    rank: int

    _tensorlease_member: EngineMember | None = None
    _tensorlease_watched: bool = False
    # An update has begun that did not come to its end.
    _tensorlease_half: bool = False
    # What has come of it, where layers are loaded anew.
    _tensorlease_complete: Completeness | None = None

    def tensorlease_init(self, channel: str, replica: str, endpoint: str = "") -> int:
        """Joins the channel; again: as another member, the former is closed.

        Args:
            channel: The stream of versions.
            replica: What the engine is called there.
            endpoint: The broker's address; empty: where agents look by default.

        Returns:
            The member number; there are as many as the engine has workers.

        Raises:
            UpdateError: The former is in a round.
        """
        if self._tensorlease_member is not None:
            self._tensorlease_member.require_idle()
        self.tensorlease_close()
        parallel = self.vllm_config.parallel_config
        # Of the data-parallel ranks; versions that have no index have ranks alone.
        index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        member = int(index) * int(parallel.world_size) + int(self.rank)
        worker = WorkerAgent(
            channel,
            replica=replica,
            member=member,
            size=int(parallel.data_parallel_size) * int(parallel.world_size),
            endpoint=endpoint,
            device=self.device,
        )
        try:
            self._tensorlease_member = EngineMember(
                worker, self._tensorlease_load, lacks=self._tensorlease_lacking
            )
        except BaseException:
            worker.close(0.0)
            raise
        if not self._tensorlease_watched:
            # Workers outlive a server that is killed; they must not keep its seat from a new one.
            self._tensorlease_watched = True
            call_at_end(server_pid(), self.tensorlease_close)
        return member

    def tensorlease_receive(self, version: int | str, timeout: float | str = 300.0) -> int:
        """Loads what the round of a version brings; returns the version, once it is to commit.

        Args:
            version: What the round is to make.
            timeout: Limit in seconds.

        Raises:
            UpdateError: `tensorlease_init` has not come before; or the round did not begin, failed,
                or is not over in time: the model may have half of it, and must not be used until a
                later version has come.
        """
        if self._tensorlease_member is None:
            raise UpdateError("tensorlease_init has to come before tensorlease_receive")
        try:
            number, limit = int(version), float(timeout)
        except ValueError:
            raise ConfigError(
                f"version {version!r}, timeout {timeout!r}: must be numbers, or text of them"
            ) from None
        with self._tensorlease_config():
            self._tensorlease_member.begin(copied=False)
            begin, end = self._tensorlease_reload()
            begin()
            self._tensorlease_half = True
            try:
                self._tensorlease_member.receive(number, limit, end)
            except BaseException:
                vllm_layers.give_up(self.model_runner.model)
                raise
            self._tensorlease_half = False
        return number

    def tensorlease_close(self) -> None:
        """Leaves the channel. Idempotent."""
        member, self._tensorlease_member = self._tensorlease_member, None
        if member is not None:
            member.close()

    # ------------------------------------------------------------ inside

    def _tensorlease_load(self, tensors: Tensors) -> None:
        # A loader may keep what it is given until a layer is complete.
        given = Given((name, tensor.clone()) for name, tensor in tensors)
        try:
            loaded = self.model_runner.model.load_weights(given)
        except Exception as error:
            raise UpdateError(f"the engine's {given.said(error)}") from error
        if self._tensorlease_complete is not None:
            self._tensorlease_complete.loaded(loaded)

    def _tensorlease_lacking(self, subset: bool) -> list[str]:
        return vllm_layers.lacking(self.model_runner.model, whole=not subset)

    def _tensorlease_config(self) -> AbstractContextManager[object]:
        """Returns what makes the engine's settings those that vLLM's layers see."""
        try:
            from vllm.config import set_current_vllm_config
        except ImportError:
            return nullcontext()
        context: AbstractContextManager[object] = set_current_vllm_config(self.vllm_config)
        return context

    def _tensorlease_reload(self) -> tuple[Callable[[], object], Finish]:
        """Returns what comes before all loads of an update, and after them."""
        model, config = self.model_runner.model, self.vllm_config.model_config
        try:
            from vllm.model_executor.model_loader import reload
        except ImportError:
            # Before layers could be loaded anew: right for weights that nothing is made of.
            from vllm.model_executor.model_loader.utils import process_weights_after_loading

            return (
                lambda: None,
                lambda _: process_weights_after_loading(model, config, self.device),
            )

        def begin() -> None:
            if self._tensorlease_half:
                # What layers have kept of an update that failed must not be mixed with this one's.
                reload.finalize_layerwise_reload(model, config)
            aliases = aliases_of(model)
            reload.initialize_layerwise_reload(model)
            self._tensorlease_complete = Completeness(model, aliases)

        def end(info: RoundInfo) -> None:
            assert self._tensorlease_complete is not None
            self._tensorlease_complete.require(subset=info.subset)
            reload.finalize_layerwise_reload(model, config)

        return begin, end
