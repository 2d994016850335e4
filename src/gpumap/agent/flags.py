"""The table of `serve`'s flags. The parser, the environment variables and docs/reference/flags.md are made from it.

Every command line reads it, so the names of groups and dialects are repeated here: their tables take long to import.
tests/test_start.py compares both.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import NamedTuple

from gpumap.model.resources import DEFAULT_RESOURCE_PATTERN

LONGEST_DEFAULT_SHOWN = 60
"""Longer defaults are not useful in --help."""
ABOUT = {"serving": "what is served", "sources": "where this node's sources are", "log": "log"}
"""Parts of --help, with their titles."""
GROUPS = ("allocation", "use", "accounting", "device", "health", "links", "gpm", "codec")
DEFAULT_GROUPS = tuple(group for group in GROUPS if group != "codec")
DIALECTS = (
    *("pod-gpu-map", "pod-gpu-map-deprecated", "gpu-mem-monitor", "cadvisor", "gpu-manager", "nvidia-smi"),
    *("dcgm", "dcgm-join", "arms"),
)
DEFAULT_DIALECTS = ("pod-gpu-map",)
"""In addition to the native families, which only --no-native turns off."""
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class Flag(NamedTuple):
    """`metavar` is empty for a switch, which has an `opposite` where it is on by default. `default` is as a user would
    write it. `choices` are for help and completion."""

    name: str
    metavar: str
    default: str
    help: str
    repeatable: bool = False
    about: str = "serving"
    """Its part of `ABOUT`. Commands that only read a node have the flags of `sources` and `log`."""
    choices: tuple[str, ...] = ()

    @property
    def opposite(self) -> str:
        """The flag that turns off a switch that is on by default; otherwise empty."""
        return f"--no-{self.name.removeprefix('--')}" if not self.metavar and self.default == "true" else ""

    @property
    def variable(self) -> str:
        return "GPUMAP_" + self.name.removeprefix("--").upper().replace("-", "_")


FLAGS = (
    Flag("--listen", "ADDR", ":9401", "address to serve on, such as :9401, [::1]:9401 or 127.0.0.1:0"),
    Flag("--interval", "DURATION", "5s", "time from one collection to the next, such as 500ms or 1m"),
    Flag("--push", "", "true", "collect as soon as the kubelet allocates; --no-push: at the interval alone"),
    Flag("--nvml-release", "", "false", "let go of the driver between collections; SIGUSR1 does it once"),
    Flag("--stale-after", "DURATION", "60s", "data older than this is not served"),
    Flag("--node-name", "NAME", "", "this node's name; else $NODE_NAME, else the host name", about="sources"),
    Flag("--node-ip", "IP", "", "this node's internal IP; else $NODE_IP", about="sources"),
    Flag("--kubelet-root", "DIR", "/var/lib/kubelet", "the kubelet's root directory", about="sources"),
    Flag(
        "--kubelet-socket",
        "PATH",
        "",
        "PodResources socket; else <kubelet-root>/pod-resources/kubelet.sock",
        about="sources",
    ),
    Flag(
        "--device-checkpoint",
        "PATH",
        "",
        "device checkpoint; else device-plugins/kubelet_internal_checkpoint in the kubelet root or /var/lib/kubelet, "
        "the newer of both",
        about="sources",
    ),
    Flag(
        "--pods-api-socket",
        "PATH",
        "",
        "the kubelet's Pods API (from 1.37), for UIDs, container ids and device health; else it is not asked",
        about="sources",
    ),
    Flag(
        "--pod-log-root",
        "DIR",
        "/var/log",
        "where the directories pods and containers of the logs are",
        about="sources",
    ),
    Flag("--proc", "DIR", "/proc", "the process tree", about="sources"),
    Flag(
        "--nvml-library",
        "PATH",
        "",
        "the driver's library; else libnvidia-ml.so.1 by the loader's search",
        about="sources",
    ),
    Flag("--resource", "REGEX", DEFAULT_RESOURCE_PATTERN, "resources that are GPUs, matched whole", about="sources"),
    Flag(
        "--collect",
        "GROUP",
        ",".join(DEFAULT_GROUPS),
        f"group of metrics to measure and serve: {', '.join(GROUPS)}, or all",
        repeatable=True,
        choices=(*GROUPS, "all"),
    ),
    Flag(
        "--dialect",
        "NAME",
        ",".join(DEFAULT_DIALECTS),
        f"names to serve in addition to the native ones: {', '.join(DIALECTS)}, all or none",
        repeatable=True,
        choices=(*DIALECTS, "all", "none"),
    ),
    Flag("--no-native", "", "false", "serve only the dialects and the self-metrics"),
    Flag("--process-metrics", "", "false", "serve gpumap_process_gpu_memory_used_bytes, a series per process"),
    Flag("--state-file", "PATH", "", "where counters of accounting and XID errors survive a restart; else they do not"),
    Flag("--web-config", "FILE", "", "TLS, client certificates and passwords, as exporters take them; else plain HTTP"),
    Flag("--log-format", "text|json", "text", "format of the log", about="log", choices=LOG_FORMATS),
    Flag("--log-level", "LEVEL", "info", "debug, info, warning or error", about="log", choices=LOG_LEVELS),
)


def add_flags(
    parser: argparse.ArgumentParser, about: Collection[str] = tuple(ABOUT), hidden: Collection[str] = ()
) -> None:
    """Add `serve`'s flags, each to its part of --help.

    What is `hidden` is taken, and not shown.
    """
    for part in about:
        group = parser.add_argument_group(ABOUT[part])
        for flag in FLAGS:
            if flag.about == part:
                _add_flag(group, flag, hidden=part in hidden)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, *, hidden: bool) -> None:
    default = flag.default if len(flag.default) <= LONGEST_DEFAULT_SHOWN else "docs/reference/flags.md has it"
    text = f"{flag.help} ({f'default: {default}; ' if default else ''}${flag.variable})".replace("%", "%%")
    text = argparse.SUPPRESS if hidden else text
    if not flag.metavar:
        group.add_argument(flag.name, action="store_const", const="true", help=text)
        if flag.opposite:
            group.add_argument(
                flag.opposite,
                dest=flag.name.removeprefix("--").replace("-", "_"),
                action="store_const",
                const="false",
                help=argparse.SUPPRESS if hidden else f"not {flag.name}",
            )
    elif flag.repeatable:
        group.add_argument(flag.name, metavar=flag.metavar, action="append", help=text)
    else:
        group.add_argument(flag.name, metavar=flag.metavar, help=text)
