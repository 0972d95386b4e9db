"""A vLLM engine behind a `VLLMWeightSyncClient`, as a leader sees a server."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, Protocol

from tensorlease.protocol.errors import ConfigError, TensorleaseError

from .vllm_server import ServerError, VLLMServer


class WeightSyncClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`, as far as it is used here."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Has the workers join a channel."""

    def start_weight_update(self) -> None:
        """Begins an update."""

    def update_weights(self, update_info: Any) -> None:
        """Has the workers take a version."""

    def finish_weight_update(self) -> None:
        """Ends an update; vLLM's own take a `weight_version`, too."""


class ClientServer:
    """What a client reaches; requests are held, and engines put to sleep, by whoever made it.

    Args:
        client: Starts, updates and finishes. Where it has a `base_url`, the engine is also asked
            how many workers it has, and to drop cached prefixes of prompts after an update.
        replica: What the engine is called in its channel; empty: its address, else "vllm".
        workers: How many workers the engine has, those of all data-parallel ranks.

    Raises:
        ConfigError: It is several engines, or cannot tell how many workers it has.
    """

    def __init__(
        self, client: WeightSyncClient, replica: str = "", workers: int | None = None
    ) -> None:
        self._client = client
        self._workers = workers
        self._server: VLLMServer | None = None
        base_url = getattr(client, "base_url", None)
        if isinstance(base_url, str):
            try:
                self._server = VLLMServer(base_url)
            except ConfigError:
                if workers is None:
                    raise
        handles = getattr(client, "handles", ())
        if len(handles) > 1:
            raise ConfigError(
                f"the client has {len(handles)} engines, and a replica is one: give each a client"
                " and a trainer engine with a channel of its own"
            )
        if self._server is None and workers is None:
            raise ConfigError(
                f"a {type(client).__name__} does not tell how many workers the engine has: give"
                " workers=, those of all data-parallel ranks"
            )
        self.url = replica or ("vllm" if self._server is None else self._server.url)
        self.address = "" if self._server is None else self._server.address

    def ails(self, timeout: float = 5.0) -> str:
        """Returns why it cannot be used; empty where that cannot be asked, too."""
        return "" if self._server is None else self._server.ails(timeout)

    def world_size(self, timeout: float = 10.0) -> int:
        """Returns how many workers it has."""
        if self._workers is not None:
            return self._workers
        assert self._server is not None
        return self._server.world_size(timeout)

    def is_paused(self, timeout: float = 10.0) -> bool:
        """No: whoever pauses the engine resumes it."""
        return False

    def cannot_sleep(self, timeout: float = 60.0) -> bool:
        """No: whoever puts it to sleep knows."""
        return False

    def post(
        self, path: str, body: dict[str, Any] | None, timeout: float, **query: str | list[str]
    ) -> Any:
        """Has the client do what the endpoint does; raises `ServerError` where it does not.

        Args:
            path: The endpoint.
            body: What it is given.
            timeout: Limit in seconds.
            query: Of what is asked of the engine itself.
        """
        client, given = self._client, body or {}
        match path:
            case "/init_weight_transfer_engine":
                self._call(
                    path, lambda: client.init_weight_transfer_engine(given["init_info"]), timeout
                )
            case "/start_weight_update":
                self._call(path, client.start_weight_update, timeout)
            case "/update_weights":
                self._call(path, lambda: client.update_weights(given["update_info"]), timeout)
            case "/finish_weight_update":
                self._call(path, lambda: self._finish(given.get("weight_version")), timeout)
            case "/reset_prefix_cache" if self._server is not None:
                return self._server.post(path, None, timeout, **query)
            case _:
                pass
        return None

    def _finish(self, version: str | None) -> None:
        finish: Callable[..., None] = self._client.finish_weight_update
        if version is not None and "weight_version" in inspect.signature(finish).parameters:
            finish(weight_version=version)
        else:
            finish()

    def _call(self, path: str, work: Callable[[], None], timeout: float) -> None:
        """Calls the client in a thread of its own: its limits, if any, are others."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="tensorlease-client", daemon=True).start()
        try:
            done.result(timeout)
        except TensorleaseError:
            raise
        except Exception as error:
            if isinstance(error, NotYetError) and not done.done():
                raise ServerError(f"{self.url}{path} has not answered in {timeout:g} s") from None
            said = str(error) or type(error).__name__
            # A refused request has an answer; a lost one may still be carried out.
            refused = getattr(error, "response", None) is not None
            raise ServerError(f"{self.url}{path}: {said}", refused=refused) from error
