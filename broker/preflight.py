"""What a broker needs of its host, looked at while nothing is made, taken or bound.

`tensorlease broker` begins with it, and `tensorlease config-check` consists of it, so that the one
passes what the other does.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence

from ..protocol.endpoint import Endpoint
from ..protocol.errors import ConfigError
from .config import BrokerConfig
from .descriptors import check_descriptors
from .endpoints import Access, SocketPlace, access_of, choose_endpoints
from .http import load_meter
from .loops import choose_loop


class PreflightError(ConfigError):
    """Settings that cannot work on this host, for this user.

    Attributes:
        problems: Each of them.
    """

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        return self._problems


def check_start(config: BrokerConfig, environ: Mapping[str, str]) -> None:
    """Refuse what a broker with these settings would be refused, if this process started it now.

    A broker that runs already is no objection, nor is a tcp port that is taken: settings can be
    checked while they are in use.

    Args:
        config: The settings.
        environ: The environment: where to listen if the settings do not say.

    Raises:
        PreflightError: Names all that cannot work.
    """
    problems: list[ConfigError] = []

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            problems.append(error)

    endpoints: list[Endpoint] = []
    access = Access(os.geteuid())
    with noting():
        choose_loop(config.uvloop)
    with noting():
        access = access_of(config)
    with noting():
        endpoints = choose_endpoints(config, environ, access.uid)
    for endpoint in endpoints:
        with noting():
            SocketPlace(endpoint, access).check()
    with noting():
        check_descriptors(config.limits.max_agents)
    with noting():
        check_shm_dir(config.shm_dir)
    if config.http:
        with noting():
            load_meter(config.http)
    if problems:
        raise PreflightError(problems)


def check_shm_dir(directory: str) -> None:
    """Refuse a directory for segments that is not there.

    The broker's user need not be able to write to it: it removes segments of trainers of that user
    only, and these could not have made any.

    Raises:
        ConfigError: There is none.
    """
    try:
        mode = os.stat(directory).st_mode
    except PermissionError:
        return  # Those may see it whose segments are there.
    except OSError as error:
        raise ConfigError(
            f"shm-dir = {directory!r}: {os.strerror(error.errno or 0)}; make it, or name the one"
            " that trainers and workers use"
        ) from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"shm-dir = {directory!r}: is not a directory")
