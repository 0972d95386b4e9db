"""The arguments of agents: checked before anything happens, and filled from the environment."""

from __future__ import annotations

import enum
import operator
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from typing import TYPE_CHECKING, Final, TypedDict

from ..protocol.endpoint import JOB_VARIABLE
from ..protocol.errors import ConfigError
from ..protocol.limits import MAX_VERSION
from ..protocol.records import Distribution, Terms
from .core import Identity
from .process import this_host, this_process

if TYPE_CHECKING:
    import torch

_GPU: Final = re.compile(r"cuda(?::([0-9]{1,4}))?")
_UUID: Final = re.compile(
    r"(?:GPU-|MIG-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE
)

_SAY_WHICH: Final = "give its number here, as in 'cuda:0', or its UUID, as `nvidia-smi -L` lists it"


class RoundOptions(TypedDict, total=False):
    """What a trainer may ask of a round. All ranks must ask the same, but for the names of a subset,
    of which each gives those that it holds.
    """

    min_replicas: int
    """With fewer the round fails; default 1."""
    strict: bool
    """One worker that refuses or is lost fails the round; default False."""
    subset: Collection[str]
    """Names of the tensors that the round carries; default: all. Only replicas at `base` get it."""
    base: int
    """The version that a subset changes; default: the channel's last."""
    open_s: float
    """Limit for enough replicas to be ready, in seconds; 0 (default) takes the broker's own."""
    prepare_s: float
    """Limit for the prepare hooks."""
    stage_s: float
    """Limit for a worker that makes no progress with its copies."""
    commit_s: float
    """Limit for the commit hooks."""
    verify: bool
    """Digests of what is published are compared with digests of what each worker read, and what it
    copied with what it read. One that does not agree is out, by the tensor's name. Costs a pass
    over the bytes here and three in each worker; default False."""


class Stragglers(enum.Enum):
    """What a round does about replicas that are late: at an earlier round, or busy."""

    WAIT = "wait"
    """It waits for them."""
    SKIP = "skip"
    """It goes without them; they get the next one."""
    FAIL = "fail"
    """It is not made, or for none."""


SKIP_OPEN_S: Final = 0.05
"""Open limit, in seconds, of a round that waits for nobody."""


def stragglers_of(given: Stragglers | str, world_size: int) -> Stragglers:
    """Returns what the user chose; raises `ConfigError` for what cannot be."""
    try:
        chosen = Stragglers(given)
    except ValueError:
        names = ", ".join(repr(choice.value) for choice in Stragglers)
        raise ConfigError(f"stragglers {given!r}: must be one of {names}") from None
    if chosen is Stragglers.SKIP and world_size > 1:
        raise ConfigError(
            f"stragglers 'skip' with {world_size} ranks: each would decide for itself, and some"
            " would open a round that others skip; use 'wait' with a short open_s on all ranks, or"
            " ask handle.finished.done on one rank and tell the others"
        )
    return chosen


def options_of(stragglers: Stragglers, quorum: int | None, options: RoundOptions) -> RoundOptions:
    """Returns the options of a round with this policy; raises `ConfigError` for a contradiction."""
    chosen = options.copy()
    if quorum is not None:
        if "min_replicas" in options:
            raise ConfigError("quorum and min_replicas are the same thing: give one of them")
        chosen["min_replicas"] = check_number("quorum", quorum)
    if stragglers is Stragglers.FAIL:
        if options.get("strict") is False:
            raise ConfigError("stragglers 'fail' makes a strict round: leave strict=False out")
        chosen["strict"] = True
    elif stragglers is Stragglers.SKIP:
        chosen.setdefault("open_s", SKIP_OPEN_S)
    return chosen


def label_of(device: str | torch.device) -> str:
    """Returns what a device is called in every process: a GPU by its UUID, since its number differs.

    Raises:
        ConfigError: It is a GPU that there is not, or no device at all.
    """
    name = _named(device)
    if name == "cpu":
        return "cpu:0"
    if (uuid := _UUID.fullmatch(name)) is not None:  # As nvidia-smi writes it, or as here.
        return uuid[1].lower()
    gpu = _GPU.fullmatch(name)
    if gpu is None and name.startswith("cuda:"):
        raise ConfigError(f"device {name[:64]!r} is no GPU: {_SAY_WHICH}")
    if gpu is None:
        return name
    from .cuda_driver import CudaError, uuid_of

    try:
        return uuid_of(_current() if gpu[1] is None else int(gpu[1]))
    except CudaError as error:
        raise ConfigError(
            f"device {name!r} is no GPU that this process sees ({error}): {_SAY_WHICH}"
        ) from None


def _named(device: object) -> str:
    if isinstance(device, str):
        return device
    import torch

    if isinstance(device, torch.device):
        return str(device)
    raise ConfigError(f"device {device!r}: must be a text, 'cuda:0' say, or a torch.device")


def _current() -> int:
    import torch

    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if begun else 0


def identity(channel: str, instance: str, device: str | torch.device) -> Identity:
    """Returns who an agent of this process is; its lock is known when it has found a broker."""
    return Identity(
        instance=instance,
        channel=check_name("channel", channel),
        host=this_host(),
        device=check_name("device", label_of(device)),
        processes=[this_process()],
        locked=False,
        software=f"tensorlease {_version('tensorlease')} torch {_version('torch')}",
        job=os.environ.get(JOB_VARIABLE, "")[:256],
    )


def new_instance() -> str:
    """Returns a random id of one run of an agent: 16 hexadecimal digits."""
    return secrets.token_hex(8)


def check_name(what: str, name: object) -> str:
    """Returns the name; raises `ConfigError` unless it is printable text of 1 to 128 characters."""
    if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isprintable():
        raise ConfigError(f"{what} {name!r}: must be printable text of 1 to 128 characters")
    return name


def check_number(what: str, number: int) -> int:
    """Returns a whole number as an int, which numpy's and torch's are not, and messages need.

    Raises:
        ConfigError: It is none: a float, a bool or a text, say.
    """
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise ConfigError(f"{what} {number!r}: must be a whole number")


def wanted_replicas(replicas: int | Collection[str]) -> tuple[int, frozenset[str]]:
    """Returns how many replicas are asked for, and which; raises `ConfigError` for what is neither."""
    if not isinstance(replicas, Collection):
        return check_number("replicas", replicas), frozenset()
    if isinstance(replicas, str):
        raise ConfigError(f"replicas {replicas!r}: must be a whole number, or a list of names")
    names = frozenset(check_name("replica", name) for name in replicas)
    return len(names), names


def check_place(what: str, place: int, count: int, of: str) -> tuple[int, int]:
    """Returns both as ints; raises `ConfigError` unless `place` is one of 0 to `count` - 1."""
    place, count = check_number(what, place), check_number(of, count)
    if not 1 <= count <= 65_536:
        raise ConfigError(f"{of} {count}: must be 1 to 65536")
    if not 0 <= place < count:
        raise ConfigError(
            f"{what} {place}: must be 0 to {count - 1}, for a {of} of {count}; is the {of} given?"
        )
    return place, count


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def check_timeout(what: str, timeout: float) -> float:
    """Returns a limit in seconds; raises `ConfigError` for one that is no limit."""
    if not isinstance(timeout, Real) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{what} {timeout!r}: must be a number of seconds, 0 or more")
    return float(timeout)


def deadline_of(timeout: float) -> float:
    """Returns when a limit of `timeout` seconds from now passes; refuses one that never does."""
    return time.monotonic() + check_timeout("timeout", timeout)


_HINTS: Final = {
    "quorum": "min_replicas is its name here (quorum is another for publish_nowait); ",
    "replicas": "min_replicas is its name here; ",
    "stragglers": "publish_nowait has it; ",
    "snapshot": "publish_nowait has it; ",
}
"""What may be meant by options that a round does not have."""


def terms_of(version: int, options: RoundOptions) -> Terms:
    """Returns what is asked of a round; raises `ConfigError` for what cannot be asked."""
    if unknown := sorted(options.keys() - RoundOptions.__annotations__.keys()):
        known = ", ".join(["timeout", *RoundOptions.__annotations__])
        hint = _HINTS.get(unknown[0], "")
        raise ConfigError(f"unknown option {unknown[0]!r}: {hint}a round has {known}")
    version = check_number("version", version)
    if not 1 <= version <= MAX_VERSION:
        raise ConfigError(f"version {version}: must be a number from 1 to {MAX_VERSION}")
    min_replicas = check_number("min_replicas", options.get("min_replicas", 1))
    if not 0 <= min_replicas < 2**31:
        raise ConfigError(f"min_replicas {min_replicas}: must be 0 to {2**31 - 1}")
    strict, verify = options.get("strict", False), options.get("verify", False)
    for name, value in (("strict", strict), ("verify", verify)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} {value!r}: must be True or False")
    base = _base(version, options)
    return Terms(
        version,
        min_replicas,
        strict,
        bool(subset_of(options)),
        base,
        open_s=_limit("open_s", options.get("open_s", 0.0)),
        prepare_s=_limit("prepare_s", options.get("prepare_s", 0.0)),
        stage_s=_limit("stage_s", options.get("stage_s", 0.0)),
        commit_s=_limit("commit_s", options.get("commit_s", 0.0)),
        verify=verify,
    )


def subset_of(options: RoundOptions) -> tuple[str, ...]:
    """Returns the names that a round is to carry; none: all."""
    subset = options.get("subset")
    if subset is None:
        return ()
    given: object = subset
    names = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"subset {subset!r}: must be names of tensors, at least one; leave it out for all"
        )
    return names


def _base(version: int, options: RoundOptions) -> int:
    if "base" not in options:
        return 0
    base = check_number("base", options["base"])
    if "subset" not in options:
        raise ConfigError(f"base {base}: only a subset has a base: name its tensors by subset=")
    if not 1 <= base < version:
        raise ConfigError(f"base {base}: must be from 1 to below the round's version {version}")
    return base


def _limit(name: str, seconds: float) -> float:
    if not isinstance(seconds, Real) or not 0 <= seconds <= 86_400:
        raise ConfigError(f"{name} {seconds!r}: must be 0 (the broker's own) to 86400 seconds")
    return float(seconds)


def distribution_of(given: Distribution | str | None) -> Distribution | None:
    """Returns what the user chose; None: nothing."""
    if given is None or isinstance(given, Distribution):
        return given
    try:
        return Distribution(given)
    except ValueError:
        names = " or ".join(repr(d.value) for d in Distribution)
        raise ConfigError(f"distribution {given!r}: must be {names}") from None


def from_environment(name: str, default: int) -> int:
    """Returns a number that the launcher has put into the environment."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment's {name} is {text!r}, not a number") from None


def launchers_group(environ: Mapping[str, str]) -> str:
    """What all ranks of one start by torchrun share; empty without it.

    Its default run id, `none`, tells nobody apart.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run in ("", "none"):
        return ""
    restart = f"-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return run[: 128 - len(restart)] + restart
