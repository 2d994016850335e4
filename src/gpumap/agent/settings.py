"""Turn flags and environment variables into plain, checked values. Every error is one line that names the flag."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpumap.agent.flags import (
    ABOUT,
    ALL_DIALECTS,
    DIALECTS,
    FLAGS,
    GROUPS,
    LOG_FORMATS,
    LOG_LEVELS,
    PREFIX,
    WITH_SHARED_NAMES,
    Flag,
)
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration

T = TypeVar("T")
NATIVE = "native"
SOCKET_PATH_BYTES_MAX = 107
"""unix(7): sun_path is 108 bytes, the last of them 0."""


@dataclass(frozen=True, slots=True)
class Listen:
    """`host` is empty for all addresses of this machine. `notation` is the user's, for messages."""

    host: str
    port: int
    notation: str = "--listen"


@dataclass(frozen=True, slots=True)
class Settings:
    listen: Listen
    interval_seconds: float
    stale_after_seconds: float
    idle_after_seconds: float
    grace_seconds: float
    node_name: str
    node_ip: str
    has_kubelet: bool
    """With --no-kubelet, neither the kubelet nor its files are a source, and the next six are not used."""
    kubelet_socket: Path
    checkpoint_candidates: tuple[Path, ...]
    dra_state: Path
    dra_driver_checkpoint: Path
    pods_api_socket: Path | None
    gpu_fractioning_map: Path | None
    pod_log_root: Path
    proc: Path
    sys: Path
    nvml_library: str
    nvml_release: bool
    push: bool
    resource: re.Pattern[str]
    reservation_namespace: re.Pattern[str]
    trust_namespace: re.Pattern[str] | None
    groups: tuple[str, ...]
    native: bool
    dialects: tuple[str, ...]
    """In addition to the native families."""
    process_metrics: bool
    log_format: str
    log_level: str
    web_config: Path | None = None
    visible_devices: str = "all"
    """The GPUs that gpumap's container has, of NVIDIA's runtime."""
    own_entry: Path = Path("/proc/self")
    """gpumap's own entry of the process tree. A capture has another."""


def resolve(
    args: argparse.Namespace, environment: Mapping[str, str], about: Collection[str] = tuple(ABOUT)
) -> Settings:
    """Check every flag and variable. Raises UsageError.

    Flags that the command does not use (`about` does not contain them) keep their default, whatever the environment.
    """
    values = {flag.name: _read(flag, args, environment if flag.about in about else {}) for flag in FLAGS}
    interval_seconds = values["--interval"].parse(parse_duration)
    stale_after_seconds = values["--stale-after"].parse(parse_duration)
    if stale_after_seconds < interval_seconds:
        raise values["--stale-after"].error(f"must be at least --interval ({values['--interval'].word})")
    no_native, dialects = _page(values)
    has_kubelet = _has_kubelet(values)
    root = values["--kubelet-root"].parse(_directory)
    checkpoint = values["--device-checkpoint"].word
    kubelet_socket = values["--kubelet-socket"].word
    in_root = Path("device-plugins/kubelet_internal_checkpoint")
    candidates = dict.fromkeys((root / in_root, Path("/var/lib/kubelet") / in_root))
    return Settings(
        listen=replace(values["--listen"].parse(parse_listen), notation=values["--listen"].origin),
        interval_seconds=interval_seconds,
        stale_after_seconds=stale_after_seconds,
        idle_after_seconds=values["--idle-after"].parse(parse_duration),
        grace_seconds=values["--grace"].parse(parse_duration),
        node_name=values["--node-name"].word or environment.get("NODE_NAME", "") or socket.gethostname(),
        node_ip=values["--node-ip"].word or environment.get("NODE_IP", ""),
        has_kubelet=has_kubelet,
        kubelet_socket=values["--kubelet-socket"].parse(_socket) if kubelet_socket else _socket_below(root, values),
        checkpoint_candidates=(values["--device-checkpoint"].parse(_file),) if checkpoint else tuple(candidates),
        dra_state=root / "dra_manager_state",
        dra_driver_checkpoint=root / "plugins" / "gpu.nvidia.com" / "checkpoint.json",
        pods_api_socket=values["--pods-api-socket"].parse_optional(_socket),
        gpu_fractioning_map=values["--gpu-fractioning-map"].parse_optional(_directory),
        pod_log_root=values["--pod-log-root"].parse(_directory),
        proc=values["--proc"].parse(_directory),
        sys=values["--sys"].parse(_directory),
        nvml_library=str(values["--nvml-library"].parse_optional(_file) or ""),
        nvml_release=values["--nvml-release"].parse(_boolean),
        push=values["--push"].parse(_boolean) and has_kubelet,
        resource=values["--resource"].parse(_pattern),
        reservation_namespace=values["--reservation-namespace"].parse(_pattern),
        trust_namespace=values["--trust-namespace"].parse_optional(_pattern),
        groups=values["--collect"].choose(GROUPS),
        native=not no_native,
        dialects=dialects,
        process_metrics=values["--process-metrics"].parse(_boolean),
        log_format=values["--log-format"].parse(_one_of(*LOG_FORMATS)),
        log_level=values["--log-level"].parse(_one_of(*LOG_LEVELS)),
        web_config=values["--web-config"].parse_optional(_file),
        visible_devices=environment.get("NVIDIA_VISIBLE_DEVICES", "all"),
    )


def collect_everything(settings: Settings) -> Settings:
    """Return settings for a capture: gpumap asks NVML for all that any group or dialect shows."""
    return replace(settings, groups=tuple(GROUPS), dialects=ALL_DIALECTS)


def quiet(settings: Settings, args: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Log only errors, unless the user chose a level: the output of a command is its answer."""
    chosen_level = args.log_level or environment.get("GPUMAP_LOG_LEVEL")
    return settings if chosen_level else replace(settings, log_level="error")


def unknown_variables(environment: Iterable[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Return the variables with gpumap's prefix that are not known, and the nearest one (empty if none is near).

    Kubernetes and Docker set variables for each Service, such as GPUMAP_SERVICE_HOST and GPUMAP_PORT_9401_TCP.
    """
    names = sorted(name for name in environment if name.startswith(PREFIX))
    services = (PREFIX, *(name.removesuffix("SERVICE_HOST") for name in names if name.endswith("_SERVICE_HOST")))
    of_services = tuple(f"{service}{end}" for service in services for end in ("SERVICE_", "PORT"))
    without_prefix = [name.removeprefix(PREFIX) for name in known]
    for name in names:
        if name not in known and not name.startswith(of_services):
            near = difflib.get_close_matches(name.removeprefix(PREFIX), without_prefix, 1)
            yield name, f"{PREFIX}{near[0]}" if near else ""


class _Value(NamedTuple):
    """The words of a flag. Errors name it."""

    words: tuple[str, ...]
    origin: str
    """The user's notation, for messages."""
    by_default: bool = False

    @property
    def word(self) -> str:
        return self.words[-1] if self.words else ""

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self.origin}: {message}")

    def parse(self, parse: Callable[[str], T]) -> T:
        try:
            return parse(self.word)
        except ValueError as error:
            raise self.error(str(error)) from error

    def parse_optional(self, parse: Callable[[str], T]) -> T | None:
        return self.parse(parse) if self.word else None

    def choose(self, choices: Iterable[str], *, none: bool = False, left_out: Collection[str] = ()) -> tuple[str, ...]:
        """Read a repeatable choice. `all` is every choice except `left_out`; a single `none` is nothing."""
        words, choices = self.words, tuple(choices)
        if none and "none" in words:
            if len(set(words)) > 1:
                raise self.error("none cannot be combined with other names")
            return ()
        for word in words:
            if word not in (*choices, "all"):
                known = ", ".join((*choices, "all", *(("none",) if none else ())))
                raise self.error(f'unknown value "{word}"; valid values: {known}')
        return tuple(choice for choice in choices if choice in words or ("all" in words and choice not in left_out))


_Values = Mapping[str, _Value]


def _page(values: _Values) -> tuple[bool, tuple[str, ...]]:
    """Return --no-native and the dialects. The word `native` is accepted as a dialect and changes nothing."""
    no_native = values["--no-native"].parse(_boolean)
    chosen = values["--dialect"].choose((NATIVE, *DIALECTS), none=True, left_out=WITH_SHARED_NAMES[1:])
    named = NATIVE in values["--dialect"].words
    dialects = tuple(name for name in chosen if name != NATIVE)
    if len(sharing := [name for name in dialects if name in WITH_SHARED_NAMES]) > 1:
        raise values["--dialect"].error(f"{' and '.join(sharing)} share metric names; select only one (all has dcgm)")
    if no_native and named:
        raise values["--no-native"].error("--dialect native contradicts it")
    if no_native and not dialects:
        raise values["--no-native"].error("leaves only the self-metrics; name a dialect to serve with --dialect")
    if no_native and values["--process-metrics"].parse(_boolean):
        raise values["--no-native"].error("--process-metrics is a native family; leave one of the two flags out")
    return no_native, dialects


def _has_kubelet(values: _Values) -> bool:
    """Return whether this node has a kubelet. Without one, no flag may set how gpumap reads it."""
    if not values["--no-kubelet"].parse(_boolean):
        return True
    for flag in FLAGS:
        switched_off = flag.opposite and not values[flag.name].parse(_boolean)
        if flag.of_kubelet and not values[flag.name].by_default and not switched_off:
            raise values[flag.name].error(f"contradicts {values['--no-kubelet'].origin}; leave one of the two out")
    return False


def _read(flag: Flag, args: argparse.Namespace, environment: Mapping[str, str]) -> _Value:
    """A flag overrides its variable, and a variable the default."""
    value = getattr(args, flag.name.removeprefix("--").replace("-", "_"), None)
    if value is not None:
        if isinstance(value, list):
            return _Value(tuple(value), flag.name)
        return _Value((value,), f"{flag.name} {value}" if flag.metavar else flag.name)
    text = environment.get(flag.variable)
    if text:
        return _Value(_split(flag, text), f"{flag.name} (from ${flag.variable}={text})")
    return _Value(_split(flag, flag.default), f"{flag.name} {flag.default}".strip(), by_default=True)


def _split(flag: Flag, text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if flag.repeatable else (text,)


def parse_listen(text: str) -> Listen:
    """Read `:9401`, `127.0.0.1:0`, `[::1]:9401`. Raises ValueError."""
    match = re.fullmatch(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<four>[^\[\]:]*)):(?P<port>\d{1,5})", text, re.ASCII)
    if match is None or int(match["port"]) > 65535:
        raise ValueError("must be an address such as :9401, 127.0.0.1:9401 or [::1]:9401")
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
        raise ValueError(f"is longer than the maximum of a socket path ({SOCKET_PATH_BYTES_MAX} bytes)")
    return Path(text)


def _mode(text: str) -> int | None:
    """Return the mode of a path; `None` if it does not exist or is not accessible: a source reports that later."""
    try:
        return os.stat(text).st_mode
    except OSError:
        return None


def _socket_below(root: Path, values: _Values) -> Path:
    try:
        return _socket(str(root / "pod-resources" / "kubelet.sock"))
    except ValueError as error:
        raise values["--kubelet-root"].error(f"{root / 'pod-resources/kubelet.sock'} {error}") from error


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def _boolean(text: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError("must be true, false, 1 or 0")
    return known[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join((', '.join(choices[:-1]), choices[-1]))}")
        return text

    return choose
