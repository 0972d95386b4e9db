"""Enough file descriptors for an agent, before it opens the first.

libzmq ends the process ("Too many open files") where it finds none, in some places: an error that
nobody could catch. Segments need none: they are mapped, and closed.
"""

from __future__ import annotations

import errno
import os
import resource

from ..protocol.errors import ConfigError

FIRST_AGENT = 24
"""Sockets, poller, locks and threads of the first agent of a process hold 11; the rest are spare."""
FURTHER_AGENT = 10
"""Each further one holds 5, and twice as many while it connects again."""


def check_descriptors(first: bool) -> None:
    """Sees whether this process may open what one more agent needs.

    Args:
        first: It is the first that connects in this process, or the first again.

    Raises:
        ConfigError: It may not; says how many are open, what the limit is, and how to raise it.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # No /proc: nothing can be told.
        opened = limit
    needed = FIRST_AGENT if first else FURTHER_AGENT
    if opened + needed > limit:
        raise ConfigError(
            f"an agent needs {needed} file descriptors, and this process has {opened} open of the"
            f" {limit} that it may: raise the limit (ulimit -n, LimitNOFILE= of a unit), or close"
            " what is not needed"
        )
