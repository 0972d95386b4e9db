"""Enough file descriptors for the configured number of agents, before the first one connects.

libzmq aborts the process in some places where it runs out of descriptors.
"""

from __future__ import annotations

import resource

from ..protocol.errors import ConfigError

PER_AGENT = 2
"""A connection, and a pidfd or the file of a live lock."""
MARGIN = 128
"""The event loop, libzmq's own, listening sockets, locks, logs, and further processes of agents."""


def needed_descriptors(max_agents: int) -> int:
    """How many descriptors a broker for that many agents needs."""
    return PER_AGENT * max_agents + MARGIN


def check_descriptors(max_agents: int) -> None:
    """Refuse what `ensure_descriptors` would, and raise nothing.

    Raises:
        ConfigError: The hard limit is too low.
    """
    needed = needed_descriptors(max_agents)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"limits.max-agents = {max_agents} needs {needed} file descriptors, this process may"
            f" open {hard}: raise the hard limit (ulimit -Hn, LimitNOFILE=), or set"
            f" limits.max-agents to at most {max(0, (hard - MARGIN) // PER_AGENT)}"
        )


def ensure_descriptors(max_agents: int) -> int:
    """Raise the soft limit on open files to what is needed, if it is lower.

    Returns:
        The limit now in force.

    Raises:
        ConfigError: The hard limit is too low.
    """
    check_descriptors(max_agents)
    needed = needed_descriptors(max_agents)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed
