"""Where settings come from: command-line flags over the environment over a TOML file over defaults.

A setting that cannot be used is an error before anything is bound, never silently the default; all
that is wrong is told at once.
"""

from __future__ import annotations

import difflib
import enum
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, inspect

from ..protocol.endpoint import ENDPOINT_VARIABLE, parse_endpoint
from ..protocol.errors import ConfigError
from .config import BrokerConfig, Section, SocketMode
from .http import parse_http

PREFIX = "TENSORLEASE_"
FOREIGN_VARIABLES = frozenset({ENDPOINT_VARIABLE})
"""Variables that begin like settings and are none: agents read them."""
FOREIGN_PREFIXES = ("TENSORLEASE_AGENT_", "TENSORLEASE_TEST_")


class Problem(Struct, frozen=True):
    """One setting that cannot be used."""

    source: str
    """The file's path, `environment` or `command line`."""
    key: str
    """As it is written in that source."""
    value: str
    text: str
    """What is wrong, and what is allowed or meant."""

    def __str__(self) -> str:
        return f"{self.source}: {self.key}{self.value and ' = ' + self.value}: {self.text}"


class SettingsError(ConfigError):
    """Settings that cannot be used.

    Attributes:
        problems: Each of them.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self._problems


class Setting(Struct, frozen=True):
    """A key that can be set: its dotted name in kebab-case, its type and what it allows."""

    key: str
    type: object
    allowed: str
    is_list: bool

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.key.replace(".", "__").replace("-", "_").upper()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.key.replace(".", "-")


class Given(Struct, frozen=True):
    """A value as one source gives it."""

    value: object
    source: str
    written: str
    """The key as written in that source."""
    textual: bool
    """The source knows text only, so numbers come as text."""


def _settings(section: type[Section], prefix: str = "") -> Iterator[Setting]:
    for field in msgspec.structs.fields(section):
        kind = inspect.type_info(field.type)
        if isinstance(kind, inspect.StructType):
            yield from _settings(field.type, f"{prefix}{field.encode_name}.")
        else:
            yield Setting(
                prefix + field.encode_name,
                field.type,
                _allowed(kind),
                isinstance(kind, inspect.VarTupleType),
            )


def _allowed(kind: inspect.Type) -> str:
    """The allowed values in words."""
    match kind:
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {_allowed(item)}"
        case inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case inspect.FloatType(gt=low, le=high):
            return f"a number of seconds greater than {low} and at most {high}"
        case inspect.EnumType(cls=cls):
            return "one of " + ", ".join(f'"{member.value}"' for member in cls)
        case inspect.StrType(pattern=None, max_length=None):
            return "text"
        case inspect.StrType(pattern=None, max_length=length):
            return f"text of at most {length} characters"
        case inspect.StrType(pattern="^/"):
            return "an absolute path"
        case _:
            raise TypeError(f"no words for settings of type {kind!r}")


SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _settings(BrokerConfig)}
"""Every key that can be set, by its dotted name."""


def load(
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
) -> BrokerConfig:
    """The effective settings.

    Args:
        file: A TOML file that must exist, or None.
        environ: The environment; `TENSORLEASE_SECTION__KEY` and `TENSORLEASE_KEY` are read, lists
            separated by commas.
        flags: What the command line gives, by dotted key; None values were not given.

    Raises:
        SettingsError: Names each key that is unknown (and the nearest known one), has a wrong type
            or is out of range.
        ConfigError: The file cannot be read, or is a pipe, a device or a directory.
    """
    problems: list[Problem] = []
    given: dict[str, Given] = {}
    values: dict[str, object] = {}
    layers = [_from_environment(environ, problems), _from_flags(flags or {}, problems)]
    if file is not None:
        layers.insert(0, _from_file(file, problems))
    for layer in layers:
        for key, item in layer.items():
            setting = SETTINGS[key]
            try:
                values[key] = msgspec.convert(item.value, setting.type, strict=not item.textual)
            except msgspec.ValidationError as error:
                text = f"{error}; allowed: {setting.allowed}"
                problems.append(Problem(item.source, item.written, repr(item.value), text))
            given[key] = item
    if problems:
        raise SettingsError(problems)
    config = msgspec.convert(msgspec.to_builtins(_nested(values)), BrokerConfig)
    _cross_check(config, given)
    return config


def _from_file(file: Path, problems: list[Problem]) -> dict[str, Given]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            # A pipe could be waited for without end, and SIGHUP could not read it again.
            raise ConfigError(
                f"configuration file {file} is not a regular file; write the settings to one"
            )
        with file.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"configuration file {file}: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"configuration file {file} is not TOML: nested too deep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} is not TOML: {error}") from error
    sections = {key.partition(".")[0] for key in SETTINGS if "." in key}
    given: dict[str, Given] = {}
    for name, value in document.items():
        if name in sections and not isinstance(value, dict):
            problems.append(
                Problem(str(file), name, repr(value), f"is a table; write [{name}] and keys in it")
            )
            continue
        inner = value.items() if name in sections else [("", value)]
        for key, leaf in inner:
            dotted = f"{name}.{key}" if key else name
            if dotted in SETTINGS:
                given[dotted] = Given(leaf, str(file), dotted, textual=False)
            else:
                problems.append(
                    Problem(
                        str(file), dotted, repr(leaf), f"unknown key{_nearest(dotted, SETTINGS)}"
                    )
                )
    return given


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> dict[str, Given]:
    variables = {setting.variable: setting for setting in SETTINGS.values()}
    given: dict[str, Given] = {}
    for name, text in environ.items():
        if (
            not name.startswith(PREFIX)
            or name in FOREIGN_VARIABLES
            or name.startswith(FOREIGN_PREFIXES)
        ):
            continue
        setting = variables.get(name)
        if setting is None:
            problems.append(
                Problem("environment", name, repr(text), f"unknown key{_nearest(name, variables)}")
            )
            continue
        given[setting.key] = Given(
            _split(text) if setting.is_list else text, "environment", name, textual=True
        )
    return given


def _from_flags(flags: Mapping[str, object], problems: list[Problem]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, value in flags.items():
        if value is None or value == ():
            continue
        setting = SETTINGS.get(key)
        if setting is None:
            problems.append(
                Problem("command line", key, repr(value), f"unknown key{_nearest(key, SETTINGS)}")
            )
            continue
        if setting.is_list and isinstance(value, str):
            value = _split(value)
        given[key] = Given(value, "command line", setting.flag, textual=True)
    return given


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _nearest(written: str, known: Mapping[str, Setting]) -> str:
    """The known key most like an unknown one, else all of them, as half a sentence."""
    # A right key in the wrong table comes first; the environment writes a table's dot as `__`.
    leaves = {_leaf(name): name for name in known}
    leaf = _leaf(written)
    if leaf in leaves:
        return f"; did you mean {leaves[leaf]}?"
    found = difflib.get_close_matches(written, known, n=1) or [
        leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1)
    ]
    if not found:
        return f"; known are {', '.join(known)}"
    return f"; did you mean {found[0]}?"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].rpartition("__")[2].removeprefix(PREFIX)


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, dot, leaf = key.partition(".")
        if dot:
            sections.setdefault(section, {})[leaf] = value
        else:
            tree[key] = value
    return tree | sections


def _cross_check(config: BrokerConfig, given: Mapping[str, Given]) -> None:
    """What no single key can say.

    Raises:
        SettingsError: Settings that contradict each other, or endpoints that cannot work.
    """
    problems: list[Problem] = []
    source = given["endpoints"].source if "endpoints" in given else "defaults"
    seen: dict[str, str] = {}
    for address in config.endpoints:
        try:
            url = parse_endpoint(address).url
        except ConfigError as error:
            problems.append(Problem(source, "endpoints", "", str(error)))
            continue
        if url in seen:
            problems.append(
                Problem(source, "endpoints", repr(address), f"the same place as {seen[url]!r}")
            )
        seen[url] = address
    if config.http:
        try:
            parse_http(config.http)
        except ConfigError as error:
            problems.append(Problem(given["http"].source, "http", "", str(error)))
    if config.socket_group and config.socket_mode is SocketMode.OWNER:
        problems.append(
            Problem(
                given["socket-group"].source,
                "socket-group",
                repr(config.socket_group),
                'has no effect with socket-mode = "0600"; use "0660" or "auto"',
            )
        )
    durations = config.durations
    if durations.silent < 2 * durations.beat:
        item = given.get("durations.silent") or given["durations.beat"]
        problems.append(
            Problem(
                item.source,
                "durations.silent",
                repr(durations.silent),
                f"must be at least twice durations.beat ({durations.beat}), or every agent that"
                " is one beat late is silent",
            )
        )
    if config.limits.max_queue_bytes < config.limits.max_body_bytes:
        item = given.get("limits.max-queue-bytes") or given["limits.max-body-bytes"]
        problems.append(
            Problem(
                item.source,
                "limits.max-queue-bytes",
                repr(config.limits.max_queue_bytes),
                f"must hold one body (limits.max-body-bytes = {config.limits.max_body_bytes})",
            )
        )
    if problems:
        raise SettingsError(problems)


def render_toml(config: BrokerConfig) -> str:
    """The settings as a TOML file that `load` reads back to the same."""
    return "\n".join(_lines(config)) + "\n"


def _lines(section: Section) -> Iterator[str]:
    fields = msgspec.structs.fields(type(section))
    values = {field.encode_name: getattr(section, field.name) for field in fields}
    for key, value in values.items():
        if not isinstance(value, Section):
            yield f"{key} = {_toml_value(value)}"
    for key, value in values.items():
        if isinstance(value, Section):
            yield f"\n[{key}]"
            yield from _lines(value)


def _toml_value(value: object) -> str:
    match value:
        case enum.Enum():
            return _toml_value(value.value)
        case str():
            return msgspec.json.encode(value).decode()
        case tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case int() | float():
            return repr(value)
        case _:
            raise TypeError(f"no TOML for {value!r}")
