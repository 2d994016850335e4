"""The table of `serve`'s flags: the source of the parser, the environment variables and docs/reference/flags.md.

Every command line imports this module. It repeats the names of groups and dialects because their tables take long to
import. tests/test_start.py compares both.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from gpumap.model.terms import DEFAULT_RESERVATION_NAMESPACES, DEFAULT_RESOURCE_PATTERN

LONGEST_DEFAULT_SHOWN = 60
"""Longer defaults are not useful in --help."""
ABOUT = {"serving": "exporter", "sources": "sources on this node", "log": "log"}
"""Parts of --help, with their titles."""
GROUPS = ("allocation", "use", "host", "accounting", "findings", "device", "health", "links", "gpm", "codec")
DEFAULT_GROUPS = tuple(group for group in GROUPS if group != "codec")
DIALECTS = (
    *("pod-gpu-map", "pod-gpu-map-deprecated", "gpu-mem-monitor", "cadvisor", "gpu-manager", "nvidia-smi"),
    *("dcgm", "dcgm49", "dcgm-join", "arms"),
)
WITH_SHARED_NAMES = ("dcgm", "dcgm49")
"""Dialects that share names of metrics: at most one of them can be on. `all` has the first."""
ALL_DIALECTS = tuple(name for name in DIALECTS if name not in WITH_SHARED_NAMES[1:])
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


PREFIX = "GPUMAP_"
"""Of environment variables."""


class Flag(NamedTuple):
    """A flag of `serve`. `metavar` is empty for a switch; a switch that is on by default has an `opposite`.

    `default` has the form that a user writes.
    """

    name: str
    metavar: str
    default: str
    help: str
    repeatable: bool = False
    about: str = "serving"
    """Its part of `ABOUT`. Commands that only read a node have only the parts `sources` and `log`."""
    of_kubelet: bool = False
    """It sets how gpumap reads the kubelet or its files: it contradicts --no-kubelet."""

    @property
    def opposite(self) -> str:
        """The flag that turns off a switch that is on by default; otherwise empty."""
        return f"--no-{self.name.removeprefix('--')}" if not self.metavar and self.default == "true" else ""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.removeprefix("--").upper().replace("-", "_")


_SourceFlag = partial(Flag, about="sources")
_KubeletFlag = partial(Flag, about="sources", of_kubelet=True)

_PUSH = "Start a collection when the kubelet allocates a device. With --no-push, collect only at the interval."
_NO_KUBELET = "This machine has no kubelet (workstation, Slurm, Docker): read only NVML and the process tree."
_CHECKPOINT = (
    "Device checkpoint. Default: the newer device-plugins/kubelet_internal_checkpoint of the kubelet root and "
    "/var/lib/kubelet."
)
_PODS_API = (
    "Socket of the kubelet's Pods API (1.37 and later): UIDs, container ids, device health and granted shares. "
    "Default: not used."
)
_FRACTIONING = (
    "Directory with the files of KAI-Scheduler (0.18 and later) about containers that share GPUs, such as "
    "/var/run/gpu-fractioning/map. Default: not used."
)
_LIBRARY = "NVML library of the driver. Default: libnvidia-ml.so.1, found by the dynamic loader."
_RESOURCE = "Regular expression that matches the whole name of each GPU resource."
_RESERVATION = "Regular expression that matches the whole namespace of pods that reserve GPUs for a scheduler."
_TRUST = (
    "Regular expression that matches the whole namespace of pods that may use GPUs without a grant of the kubelet. "
    "Default: none."
)
_COLLECT = f"Group of metrics to measure and serve: {', '.join(GROUPS)}, or all."
_DIALECT = (
    f"Names to serve in addition to the native families: {', '.join(DIALECTS)}, all (with dcgm, "
    "without dcgm49), none, or native, which adds nothing."
)
_PROCESSES = "Serve gpumap_process_gpu_memory_used_bytes, one series for each process."
_WEB_CONFIG = "Prometheus web-config.yml with TLS, client certificates and basic auth. Default: plain HTTP."

FLAGS = (
    Flag("--listen", "ADDR", ":9401", "Address to serve on, such as :9401, [::1]:9401 or 127.0.0.1:0."),
    Flag("--interval", "DURATION", "5s", "Time between two collections, such as 500ms or 1m."),
    Flag("--push", "", "true", _PUSH, of_kubelet=True),
    Flag("--nvml-release", "", "false", "Release the driver between collections. SIGUSR1 releases it once."),
    Flag("--stale-after", "DURATION", "60s", "Maximum age of the data that gpumap serves; at least --interval."),
    Flag("--idle-after", "DURATION", "5m", "A container is idle if it did not use its GPU for so long."),
    Flag("--grace", "DURATION", "2m", "A container is watched for so long before its memory counts as unused."),
    _SourceFlag("--node-name", "NAME", "", "Name of this node. Default: $NODE_NAME, or else the host name."),
    _SourceFlag("--node-ip", "IP", "", "Internal IP of this node. Default: $NODE_IP."),
    _SourceFlag("--no-kubelet", "", "false", _NO_KUBELET),
    _KubeletFlag("--kubelet-root", "DIR", "/var/lib/kubelet", "Root directory of the kubelet."),
    _KubeletFlag(
        "--kubelet-socket", "PATH", "", "PodResources socket. Default: <kubelet-root>/pod-resources/kubelet.sock."
    ),
    _KubeletFlag("--device-checkpoint", "PATH", "", _CHECKPOINT),
    _KubeletFlag("--pods-api-socket", "PATH", "", _PODS_API),
    _KubeletFlag("--gpu-fractioning-map", "DIR", "", _FRACTIONING),
    _KubeletFlag(
        "--pod-log-root", "DIR", "/var/log", "Directory that contains the log directories pods and containers."
    ),
    _SourceFlag("--proc", "DIR", "/proc", "Process tree."),
    _SourceFlag("--sys", "DIR", "/sys", "Tree with PCI functions, to find GPUs that NVML does not list."),
    _SourceFlag("--nvml-library", "PATH", "", _LIBRARY),
    _KubeletFlag("--resource", "REGEX", DEFAULT_RESOURCE_PATTERN, _RESOURCE),
    _KubeletFlag("--reservation-namespace", "REGEX", DEFAULT_RESERVATION_NAMESPACES, _RESERVATION),
    _KubeletFlag("--trust-namespace", "REGEX", "", _TRUST),
    Flag("--collect", "GROUP", ",".join(DEFAULT_GROUPS), _COLLECT, repeatable=True),
    Flag("--dialect", "NAME", "none", _DIALECT, repeatable=True),
    Flag("--no-native", "", "false", "Serve only the dialects and the self-metrics."),
    Flag("--process-metrics", "", "false", _PROCESSES),
    Flag("--web-config", "FILE", "", _WEB_CONFIG),
    Flag("--log-format", "text|json", "text", "Format of the log.", about="log"),
    Flag("--log-level", "LEVEL", "info", "Level of the log: debug, info, warning, error.", about="log"),
)


def add_flags(
    parser: argparse.ArgumentParser, about: Collection[str] = tuple(ABOUT), hidden: Collection[str] = ()
) -> None:
    """Add `serve`'s flags, each to its part of --help, which does not show the `hidden` parts."""
    for topic in about:
        group = parser.add_argument_group(ABOUT[topic])
        for flag in FLAGS:
            if flag.about == topic:
                _add_flag(group, flag, hidden=topic in hidden)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, *, hidden: bool) -> None:
    default = flag.default if len(flag.default) <= LONGEST_DEFAULT_SHOWN else "see docs/reference/flags.md"
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
                help=argparse.SUPPRESS if hidden else f"Turn off {flag.name}.",
            )
    elif flag.repeatable:
        group.add_argument(flag.name, metavar=flag.metavar, action="append", help=text)
    else:
        group.add_argument(flag.name, metavar=flag.metavar, help=text)
