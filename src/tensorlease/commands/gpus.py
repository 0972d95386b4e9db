"""What `tensorlease doctor` sees of GPUs, and whether CUDA IPC can hand their memory over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from tensorlease.agents import cuda_driver as driver
from tensorlease.agents import cuda_reasons as reasons
from tensorlease.agents.cuda_driver import CudaError

from .findings import Finding, Level

SHM = 'register with share="shm" (or "auto")'


class Gpu(Struct):
    """A GPU, or a MIG instance, that this process sees."""

    name: str
    uuid: str
    ipc: bool | None
    """Whether its driver says that it has CUDA IPC; None: it does not say."""
    mig: bool
    reaches: list[int]
    """The numbers of the others whose memory it can read."""


class Seen(Struct):
    """What there is of CUDA here."""

    gpus: list[Gpu] = []
    driver: str = ""
    """The CUDA release of the driver."""
    lacking: str = ""
    """Why there is no GPU."""
    platform: str = ""
    """One on which CUDA IPC was reported not to work; empty: another."""
    namespaces: str = ""
    """Those of a container that this process is in, in words."""
    expandable: bool = False
    """Whether the environment asks torch for expandable segments."""


def look() -> Seen:
    """Asks the driver and torch; makes no context on any device."""
    seen = Seen(
        platform=reasons.platform(),
        namespaces=reasons.namespaces(),
        expandable=reasons.expandable_segments(),
    )
    try:
        count = driver.device_count()
        seen.driver = ".".join(map(str, driver.driver_version()))
        seen.gpus = [_gpu(ordinal, count) for ordinal in range(count)]
    except CudaError as error:
        seen.lacking = str(error)
        return seen
    if not count:
        seen.lacking = f"the driver (CUDA {seen.driver}) has no device for this process"
    elif not _torch_has_cuda():
        import torch

        seen.lacking = f"torch {torch.__version__} cannot use the {count} of the driver"
        seen.gpus = []
    return seen


def _torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu(ordinal: int, count: int) -> Gpu:
    ipc: bool | None = None
    with suppress(CudaError):
        ipc = driver.supports_ipc(ordinal)
    reaches: list[int] = []
    for other in range(count):
        with suppress(CudaError):
            if other != ordinal and driver.can_access_peer(ordinal, other):
                reaches.append(other)
    name, mig = driver.name_of(ordinal), reasons.is_mig(ordinal)
    return Gpu(name, driver.uuid_of(ordinal), ipc, mig, reaches)


def findings(seen: Seen) -> Iterator[Finding]:
    """What is to be said of it; without a GPU, what is missing."""
    if not seen.gpus:
        hidden = os.environ.get(reasons.VISIBLE_VARIABLE)
        more = "" if hidden is None else f"; {reasons.VISIBLE_VARIABLE} is {hidden!r}"
        text = f"torch sees none: tensors go through shared memory ({seen.lacking}{more})"
        yield Finding("GPUs", Level.OK, text)
        return
    named = [f"cuda:{n} {gpu.name} ({gpu.uuid})" for n, gpu in enumerate(seen.gpus)]
    yield Finding("GPUs", Level.OK, f"{', '.join(named)}; driver of CUDA {seen.driver}")
    yield _ipc(seen)
    if len(seen.gpus) > 1:
        yield _peers(seen.gpus)
    yield _allocator(seen)


def _ipc(seen: Seen) -> Finding:
    name = "CUDA IPC"
    without = [f"cuda:{n}" for n, gpu in enumerate(seen.gpus) if gpu.ipc is False]
    if without:
        on = f" on {seen.platform}" if seen.platform else ""
        text = f"{', '.join(without)} without it{on}, says the driver"
        return Finding(name, Level.WARN, text, SHM)
    if seen.platform:
        text = f"as far as is known, {seen.platform} has none, whatever the driver says"
        return Finding(name, Level.WARN, text, SHM)
    if mig := [f"cuda:{n}" for n, gpu in enumerate(seen.gpus) if gpu.mig]:
        text = f"{', '.join(mig)} is a MIG instance: it goes to no other one"
        way_out = f"trainer and worker on one instance, or {SHM}"
        return Finding(name, Level.WARN, text, way_out)
    silent = any(gpu.ipc is None for gpu in seen.gpus)
    text = "the driver does not say whether it has it" if silent else "the driver has it"
    where = f"; {seen.namespaces}: trainer and worker need the same" if seen.namespaces else ""
    return Finding(name, Level.OK, f"{text}{where}")


def _peers(gpus: Sequence[Gpu]) -> Finding:
    name = "peer access"
    lacking = [
        f"cuda:{n} to {', '.join(f'cuda:{other}' for other in others)}"
        for n, gpu in enumerate(gpus)
        if (others := [o for o in range(len(gpus)) if o != n and o not in gpu.reaches])
    ]
    if lacking:
        text = f"none from {'; '.join(lacking)}"
        return Finding(name, Level.WARN, text, f"workers on their trainer's GPU, or {SHM}")
    return Finding(name, Level.OK, f"each of the {len(gpus)} GPUs reads each other")


def _allocator(seen: Seen) -> Finding:
    name = "allocator"
    if seen.expandable:
        text = "expandable segments are on in the environment, and CUDA IPC cannot share these"
        way_out = (
            f"leave expandable_segments:True out of {' and '.join(reasons.ALLOCATOR_VARIABLES)}, or"
            ' register with share="auto"'
        )
        return Finding(name, Level.WARN, text, way_out)
    return Finding(name, Level.OK, "no expandable segments in the environment")
