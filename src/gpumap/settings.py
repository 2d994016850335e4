"""Flags and environment variables to plain, checked values. Every mistake is one line that names the flag.

`FLAGS` is the one table of `serve`'s flags: the parser, the environment and docs/flags.md are made of it.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from gpumap.device_ids import DEFAULT_RESOURCE_PATTERN
from gpumap.dialects import DEFAULT_DIALECTS, DIALECTS, LATER_DIALECTS
from gpumap.errors import UsageError
from gpumap.metrics import DEFAULT_GROUPS, GROUPS, LATER_GROUPS
from gpumap.units import parse_duration

T = TypeVar("T")
SOCKET_PATH_BYTES_MAX = 107
"""unix(7): sun_path is 108 bytes, the last of them 0."""


class Flag(NamedTuple):
    """`metavar` is empty for a switch. `default` is as a user would write it."""

    name: str
    metavar: str
    default: str
    help: str
    repeatable: bool = False

    @property
    def variable(self) -> str:
        return "GPUMAP_" + self.name.removeprefix("--").upper().replace("-", "_")


FLAGS = (
    Flag("--listen", "ADDR", ":9401", "address to serve on, such as :9401, [::1]:9401 or 127.0.0.1:0"),
    Flag("--interval", "DURATION", "5s", "time from one collection to the next, such as 500ms or 1m"),
    Flag("--stale-after", "DURATION", "60s", "data older than this is not served"),
    Flag("--node-name", "NAME", "", "this node's name; else $NODE_NAME, else the host name"),
    Flag("--node-ip", "IP", "", "this node's internal IP; else $NODE_IP"),
    Flag("--kubelet-root", "DIR", "/var/lib/kubelet", "the kubelet's root directory"),
    Flag("--kubelet-socket", "PATH", "", "PodResources socket; else <kubelet-root>/pod-resources/kubelet.sock"),
    Flag(
        "--device-checkpoint",
        "PATH",
        "",
        "device checkpoint; else device-plugins/kubelet_internal_checkpoint in the kubelet root or /var/lib/kubelet",
    ),
    Flag("--pod-log-root", "DIR", "/var/log", "where the directories pods and containers of the logs are"),
    Flag("--proc", "DIR", "/proc", "the process tree"),
    Flag("--nvml-library", "PATH", "", "the driver's library; else libnvidia-ml.so.1 by the loader's search"),
    Flag("--resource", "REGEX", DEFAULT_RESOURCE_PATTERN, "resources that are GPUs, matched whole"),
    Flag(
        "--collect",
        "GROUP",
        ",".join(DEFAULT_GROUPS),
        f"group of metrics to serve: {', '.join(GROUPS)}, or all",
        repeatable=True,
    ),
    Flag(
        "--dialect",
        "NAME",
        ",".join(DEFAULT_DIALECTS),
        f"names to serve: native, {', '.join(DIALECTS)}, all or none",
        repeatable=True,
    ),
    Flag("--process-metrics", "", "false", "serve gpumap_process_gpu_memory_used_bytes, a series per process"),
    Flag("--log-format", "text|json", "text", "format of the log"),
    Flag("--log-level", "LEVEL", "info", "debug, info, warning or error"),
)

LATER_FLAGS = ("--pods-api-socket", "--nvml-release", "--push", "--state-file", "--web-config")
"""Flags of the contract that are not built yet: known, and refused."""


@dataclass(frozen=True, slots=True)
class Listen:
    """`host` is empty for every address of this machine. `given` is how the user gave it, for messages."""

    host: str
    port: int
    given: str = "--listen"


@dataclass(frozen=True, slots=True)
class Settings:
    listen: Listen
    interval_seconds: float
    stale_after_seconds: float
    node_name: str
    node_ip: str
    kubelet_socket: Path
    checkpoint_candidates: tuple[Path, ...]
    pod_log_root: Path
    proc: Path
    nvml_library: str
    resource: re.Pattern[str]
    groups: tuple[str, ...]
    dialects: tuple[str, ...]
    process_metrics: bool
    log_format: str
    log_level: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `serve`'s flags, and those to come as known but refused."""
    for flag in FLAGS:
        text = f"{flag.help} (default: {flag.default or 'none'}; ${flag.variable})".replace("%", "%%")
        if not flag.metavar:
            parser.add_argument(flag.name, action="store_const", const="true", help=text)
        elif flag.repeatable:
            parser.add_argument(flag.name, metavar=flag.metavar, action="append", help=text)
        else:
            parser.add_argument(flag.name, metavar=flag.metavar, help=text)
    parser.add_argument("--no-push", action="store_true", help="poll only; push is not built yet, so this is so anyway")
    for name in LATER_FLAGS:
        parser.add_argument(name, nargs="?", action=Later, help=argparse.SUPPRESS)


class Later(argparse.Action):
    """A flag of the contract that is not built yet."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(f"{self.option_strings[0]} is not built yet")


def resolve(given: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Check every flag and variable. Raises UsageError."""
    _refuse_later(environment)
    values = _Values({flag.name: _read(flag, given, environment) for flag in FLAGS})
    interval_seconds = values.parse("--interval", parse_duration)
    stale_after_seconds = values.parse("--stale-after", parse_duration)
    if stale_after_seconds < interval_seconds:
        raise values.error("--stale-after", "is shorter than --interval")
    root = values.parse("--kubelet-root", _directory)
    checkpoint = values.word("--device-checkpoint")
    kubelet_socket = values.word("--kubelet-socket")
    in_root = Path("device-plugins/kubelet_internal_checkpoint")
    candidates = dict.fromkeys((root / in_root, Path("/var/lib/kubelet") / in_root))
    return Settings(
        listen=replace(values.parse("--listen", parse_listen), given=values.origin("--listen")),
        interval_seconds=interval_seconds,
        stale_after_seconds=stale_after_seconds,
        node_name=values.word("--node-name") or environment.get("NODE_NAME", "") or socket.gethostname(),
        node_ip=values.word("--node-ip") or environment.get("NODE_IP", ""),
        kubelet_socket=values.parse("--kubelet-socket", _socket) if kubelet_socket else _socket_below(root, values),
        checkpoint_candidates=(values.parse("--device-checkpoint", _file),) if checkpoint else tuple(candidates),
        pod_log_root=values.parse("--pod-log-root", _directory),
        proc=values.parse("--proc", _directory),
        nvml_library=str(values.parse("--nvml-library", _file)) if values.word("--nvml-library") else "",
        resource=values.parse("--resource", _pattern),
        groups=values.choose("--collect", GROUPS, LATER_GROUPS),
        dialects=values.choose("--dialect", ("native", *DIALECTS), LATER_DIALECTS, none=True),
        process_metrics=values.parse("--process-metrics", _boolean),
        log_format=values.parse("--log-format", _one_of("text", "json")),
        log_level=values.parse("--log-level", _one_of("debug", "info", "warning", "error")),
    )


class _Given(NamedTuple):
    words: tuple[str, ...]
    origin: str
    """How the user gave it, for messages."""


class _Values:
    """What was given for each flag, read with messages that name it."""

    def __init__(self, given: Mapping[str, _Given]) -> None:
        self._given = given

    def word(self, name: str) -> str:
        words = self._given[name].words
        return words[-1] if words else ""

    def origin(self, name: str) -> str:
        return self._given[name].origin

    def error(self, name: str, message: str) -> UsageError:
        return UsageError(f"{self.origin(name)}: {message}")

    def parse(self, name: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(self.word(name))
        except ValueError as error:
            raise self.error(name, str(error)) from error

    def choose(self, name: str, built: Iterable[str], later: Iterable[str], *, none: bool = False) -> tuple[str, ...]:
        """Read a repeatable choice: `all` is all that is built; `none`, alone, is nothing."""
        words, built = self._given[name].words, tuple(built)
        if none and "none" in words:
            if len(set(words)) > 1:
                raise self.error(name, "none cannot be combined with other names")
            return ()
        for word in words:
            if word in tuple(later):
                raise self.error(name, f'"{word}" is not built yet')
            if word not in (*built, "all"):
                choices = ", ".join((*built, "all", *(("none",) if none else ())))
                raise self.error(name, f'"{word}" is not known; known are {choices}')
        return tuple(one for one in built if one in words or "all" in words)


def _read(flag: Flag, given: argparse.Namespace, environment: Mapping[str, str]) -> _Given:
    """The flag wins over its variable; both over the default."""
    value = getattr(given, flag.name.removeprefix("--").replace("-", "_"), None)
    if value is not None:
        if isinstance(value, list):
            return _Given(tuple(value), flag.name)
        return _Given((value,), f"{flag.name} {value}" if flag.metavar else flag.name)
    text = environment.get(flag.variable)
    if text:
        return _Given(_split(flag, text), f"{flag.name} (from ${flag.variable}={text})")
    return _Given(_split(flag, flag.default), f"{flag.name} {flag.default}".strip())


def _split(flag: Flag, text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if flag.repeatable else (text,)


def _refuse_later(environment: Mapping[str, str]) -> None:
    for name in LATER_FLAGS:
        variable = Flag(name, "", "", "").variable
        if environment.get(variable, "").lower() not in ("", "0", "false"):
            raise UsageError(f"{name} (from ${variable}) is not built yet")


def parse_listen(text: str) -> Listen:
    """Read `:9401`, `127.0.0.1:0`, `[::1]:9401`. Raises ValueError."""
    match = re.fullmatch(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<four>[^\[\]:]*)):(?P<port>\d{1,5})", text, re.ASCII)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("is not an address such as :9401, 127.0.0.1:9401 or [::1]:9401")
    return Listen(match["six"] or match["four"] or "", int(match["port"]))


def _directory(text: str) -> Path:
    mode = _mode(text)
    if not text or (mode is not None and not stat.S_ISDIR(mode)):
        raise ValueError("is not a directory")
    return Path(text)


def _file(text: str) -> Path:
    mode = _mode(text)
    if mode is not None and not stat.S_ISREG(mode):
        raise ValueError("is a directory" if stat.S_ISDIR(mode) else "is not a file")
    return Path(text)


def _socket(text: str) -> Path:
    mode = _mode(text)
    if mode is not None and not stat.S_ISSOCK(mode):
        raise ValueError("is a directory, not a socket" if stat.S_ISDIR(mode) else "is not a socket")
    if len(os.fsencode(text)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"is longer than the path of a socket may be ({SOCKET_PATH_BYTES_MAX} bytes)")
    return Path(text)


def _mode(text: str) -> int | None:
    """What stands at a path; `None` where nothing does, or it may not be looked at: that is a source's to tell."""
    try:
        return os.stat(text).st_mode
    except OSError:
        return None


def _socket_below(root: Path, values: _Values) -> Path:
    try:
        return _socket(str(root / "pod-resources" / "kubelet.sock"))
    except ValueError as error:
        raise values.error("--kubelet-root", f"{root / 'pod-resources/kubelet.sock'} {error}") from error


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def _boolean(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError("is not true, false, 1 or 0")
    return known[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is not {' or '.join((', '.join(choices[:-1]), choices[-1]))}")
        return text

    return choose
