"""Flags and environment variables: which of them wins, what they mean, and that each mistake is one line naming it."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import DEFAULT_GROUPS, FLAGS, Flag, add_flags
from gpumap.agent.metrics import GROUPS
from gpumap.agent.service import join_settings_of
from gpumap.agent.settings import Listen, Settings, parse_listen, resolve
from gpumap.model.errors import UsageError
from gpumap.model.formatting import parse_duration
from tests.machine import short_directory


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def settle(*arguments: str, **environment: str) -> Settings:
    parser = _Parser(allow_abbrev=False)
    add_flags(parser)
    return resolve(parser.parse_args(arguments), environment)


def mistake(*arguments: str, **environment: str) -> str:
    """The one line that is said of it."""
    with pytest.raises(UsageError) as caught:
        settle(*arguments, **environment)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused(flag: str, value: str, why: str, **other: str) -> None:
    """A value is refused as a flag and as a variable, with a message that names what the user wrote."""
    variable = Flag(flag, "", "", "").variable
    by_flag = mistake(flag, value, **other)
    assert by_flag.startswith(flag)
    assert why in by_flag
    by_variable = mistake(**{variable: value}, **other)
    assert by_variable.startswith(f"{flag} (from ${variable}={value})")
    assert why in by_variable


@pytest.fixture(name="paths")
def make_paths() -> Iterator[Path]:
    """A folder with one of each kind: `folder`, `file`, `socket`, `pipe`; `missing` is not there."""
    with short_directory() as folder, socket.socket(socket.AF_UNIX) as listener:
        (folder / "folder").mkdir()
        (folder / "file").touch()
        listener.bind(str(folder / "socket"))
        os.mkfifo(folder / "pipe")
        yield folder


# How each flag is given, and what it makes of a setting. The paths need not exist.
ACCEPTED: dict[str, tuple[str, str, str, object, object]] = {
    "--listen": ("127.0.0.1:1", "[::1]:2", "listen", ("127.0.0.1", 1), ("::1", 2)),
    "--interval": ("500ms", "1m", "interval_seconds", 0.5, 60.0),
    "--stale-after": ("1m30s", "2m", "stale_after_seconds", 90.0, 120.0),
    "--node-name": ("a", "b", "node_name", "a", "b"),
    "--node-ip": ("10.0.0.1", "fd00::1", "node_ip", "10.0.0.1", "fd00::1"),
    "--no-kubelet": ("", "0", "has_kubelet", False, True),
    "--kubelet-root": (
        "/a",
        "/b",
        "kubelet_socket",
        Path("/a/pod-resources/kubelet.sock"),
        Path("/b/pod-resources/kubelet.sock"),
    ),
    "--kubelet-socket": ("/a.sock", "/b.sock", "kubelet_socket", Path("/a.sock"), Path("/b.sock")),
    "--device-checkpoint": ("/a", "/b", "checkpoint_candidates", (Path("/a"),), (Path("/b"),)),
    "--pods-api-socket": ("/a.sock", "/b.sock", "pods_api_socket", Path("/a.sock"), Path("/b.sock")),
    "--gpu-fractioning-map": ("/a", "/b", "gpu_fractioning_map", Path("/a"), Path("/b")),
    "--pod-log-root": ("/a", "/b", "pod_log_root", Path("/a"), Path("/b")),
    "--proc": ("/a", "/b", "proc", Path("/a"), Path("/b")),
    "--sys": ("/a", "/b", "sys", Path("/a"), Path("/b")),
    "--nvml-library": ("/a.so", "/b.so", "nvml_library", "/a.so", "/b.so"),
    "--resource": ("a.*", "b", "resource", "a.*", "b"),
    "--reservation-namespace": ("a.*", "b", "reservation_namespace", "a.*", "b"),
    "--trust-namespace": ("a.*", "b", "trust_namespace", "a.*", "b"),
    "--collect": ("use", "allocation,device", "groups", ("use",), ("allocation", "device")),
    "--dialect": ("dcgm", "none", "dialects", ("dcgm",), ()),
    "--no-native": ("", "0", "native", False, True),
    "--idle-after": ("10m", "90s", "idle_after_seconds", 600.0, 90.0),
    "--grace": ("1m", "30s", "grace_seconds", 60.0, 30.0),
    "--process-metrics": ("", "0", "process_metrics", True, False),
    "--push": ("", "false", "push", True, False),
    "--nvml-release": ("", "false", "nvml_release", True, False),
    "--web-config": ("/a.yml", "/b.yml", "web_config", Path("/a.yml"), Path("/b.yml")),
    "--log-format": ("json", "text", "log_format", "json", "text"),
    "--log-level": ("debug", "error", "log_level", "debug", "error"),
}


def test_every_flag_is_tried_here() -> None:
    assert set(ACCEPTED) == {flag.name for flag in FLAGS}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_wins_over_its_variable(flag: Flag) -> None:
    """Each flag has a variable GPUMAP_<NAME>, which counts where the flag is not given."""
    by_flag, by_variable, name, of_flag, of_variable = ACCEPTED[flag.name]

    def setting(settings: Settings) -> object:
        value = getattr(settings, name)
        if isinstance(value, Listen):
            return value.host, value.port
        return getattr(value, "pattern", value)

    arguments = [flag.name, by_flag] if flag.metavar else [flag.name]
    if flag.name == "--no-native":
        arguments += ["--dialect", "dcgm"]
    assert setting(settle(**{flag.variable: by_variable})) == of_variable
    assert setting(settle(*arguments)) == of_flag
    assert setting(settle(*arguments, **{flag.variable: by_variable})) == of_flag
    assert setting(settle(**{flag.variable: ""})) == setting(settle()), "an empty variable is none"


def test_defaults() -> None:
    """Without any flag: the contract's defaults, and the host's name."""
    settings = settle()
    assert (settings.listen.host, settings.listen.port) == ("", 9401)
    assert (settings.interval_seconds, settings.stale_after_seconds) == (5.0, 60.0)
    assert (settings.node_name, settings.node_ip) == (socket.gethostname(), "")
    assert settings.kubelet_socket == Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    assert settings.checkpoint_candidates == (Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"),)
    assert (settings.proc, settings.pod_log_root, settings.nvml_library) == (Path("/proc"), Path("/var/log"), "")
    assert settings.dra_state == Path("/var/lib/kubelet/dra_manager_state")
    assert settings.dra_driver_checkpoint == Path("/var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json")
    assert settings.pods_api_socket is None, "it is asked only where a user asks for it"
    assert settings.gpu_fractioning_map is None, "it is read only where a user asks for it"
    assert settings.resource.fullmatch("nvidia.com/gpu.shared")
    assert settings.reservation_namespace.pattern == "kai-resource-reservation|runai-reservation"
    assert settings.trust_namespace is None, "without a decision of the user, no pod is trusted"
    assert settings.groups == DEFAULT_GROUPS
    assert (settings.native, settings.dialects) == (True, ())
    assert not settings.process_metrics


def test_the_node_is_named_by_the_pods_variables() -> None:
    """NODE_NAME and NODE_IP count after gpumap's own variables."""
    plain = settle(NODE_NAME="n", NODE_IP="10.0.0.9")
    assert (plain.node_name, plain.node_ip) == ("n", "10.0.0.9")
    both = settle("--node-name", "flag", NODE_NAME="n", NODE_IP="10.0.0.9", GPUMAP_NODE_IP="10.0.0.1")
    assert (both.node_name, both.node_ip) == ("flag", "10.0.0.1")


def test_a_kubelet_elsewhere_may_keep_its_checkpoint_at_home() -> None:
    """Another kubelet root has its socket; the checkpoint is looked for there and where kubelets hard-code it."""
    settings = settle("--kubelet-root", "/k")
    assert settings.kubelet_socket == Path("/k/pod-resources/kubelet.sock")
    assert [str(path.parent.parent) for path in settings.checkpoint_candidates] == ["/k", "/var/lib/kubelet"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1s", 1.0),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("1w", 604800.0),
        ("1s1ms", 1.001),
        ("1y", 31536000.0),
        ("0h1s", 1.0),
    ],
)
def test_durations_are_as_prometheus_writes_them(text: str, seconds: float) -> None:
    """One number and unit after the other, the larger ones first."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["5", "s", "5 s", "-5s", "+5s", "1.5s", "1s1m", "5S", "5s ", "٣s", "1ss", "inf", "nan"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    """Anything else is a mistake that names the flag and shows a duration."""
    assert f'"{text}" is not a duration such as' in mistake(f"--interval={text}")
    refused_variable = mistake(GPUMAP_STALE_AFTER=text)
    assert refused_variable.startswith(f"--stale-after (from $GPUMAP_STALE_AFTER={text})")


def test_data_must_live_as_long_as_the_interval() -> None:
    """--stale-after below --interval would leave gaps; the same is enough."""
    refused("--stale-after", "1s", "must be at least --interval")
    assert "must be at least --interval" in mistake("--interval", "2m")
    assert settle("--interval", "2m", "--stale-after", "2m").stale_after_seconds == 120.0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":9401", "", 9401),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:9401", "::1", 9401),
        ("localhost:80", "localhost", 80),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    """Host and port; an IPv6 address is in brackets, and no host is every address."""
    assert parse_listen(text) == Listen(host, port)


@pytest.mark.parametrize(
    "text", ["9401", ":", ":x", "::1:9401", "host", "[::1]", ":65536", ":-1", "http://a:1", ":٣", ""]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    assert "must be an address such as :9401" in mistake(f"--listen={text}")


def test_groups_and_dialects_replace_their_defaults() -> None:
    """Repeated flags and commas in a variable choose; `all` selects everything; the page's order is kept."""
    assert settle("--collect", "device", "--collect", "use").groups == ("use", "device")
    assert settle(GPUMAP_COLLECT=" use , device ").groups == ("use", "device")
    assert settle("--collect", "all").groups == tuple(GROUPS)
    assert settle("--dialect", "all").dialects == tuple(name for name in DIALECTS if name != "dcgm49")
    assert settle("--dialect", "dcgm49", "--dialect", "arms").dialects == ("dcgm49", "arms")
    assert settle("--dialect", "dcgm", "--dialect", "pod-gpu-map").dialects == ("pod-gpu-map", "dcgm")
    assert settle("--dialect", "none").dialects == ()
    assert settle("--dialect", "dcgm", GPUMAP_DIALECT="none").dialects == ("dcgm",)


@pytest.mark.parametrize("other", ["dcgm", "all"])
def test_dialects_that_share_names_exclude_each_other(other: str) -> None:
    """One page cannot have a name twice; of the two, `all` has dcgm."""
    why = "--dialect: dcgm and dcgm49 share metric names; select only one (all has dcgm)"
    assert mistake("--dialect", "dcgm49", "--dialect", other) == why
    assert mistake(GPUMAP_DIALECT=f"{other},dcgm49").startswith(f"--dialect (from $GPUMAP_DIALECT={other},dcgm49): ")


@pytest.mark.parametrize("names", [("dcgm",), ("dcgm49",), ("all",), ("none",), ("native",), ("native", "dcgm")])
def test_a_dialect_adds_to_the_native_families(names: tuple[str, ...]) -> None:
    """No value of --dialect turns the native families off. The word `native` is accepted and changes nothing."""
    settings = settle(*(word for name in names for word in ("--dialect", name)))
    assert settings.native
    assert "native" not in settings.dialects
    assert settings.dialects == settle(GPUMAP_DIALECT=",".join(names)).dialects
    assert settle("--dialect", "native", "--dialect", "dcgm").dialects == ("dcgm",)


def test_no_native_leaves_the_dialects() -> None:
    """The flag takes precedence over its variable."""
    assert not settle("--no-native", "--dialect", "all").native
    assert not settle(GPUMAP_NO_NATIVE="true", GPUMAP_DIALECT="dcgm").native
    assert not settle("--no-native", "--dialect", "dcgm", GPUMAP_NO_NATIVE="false").native
    assert mistake(GPUMAP_NO_NATIVE="no") == "--no-native (from $GPUMAP_NO_NATIVE=no): must be true, false, 1 or 0"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "leaves only the self-metrics"),
        (("--dialect", "none"), "leaves only the self-metrics"),
        (("--dialect", "native"), "--dialect native contradicts it"),
        (("--dialect", "dcgm", "--dialect", "native"), "--dialect native contradicts it"),
        (("--dialect", "dcgm", "--process-metrics"), "--process-metrics is a native family"),
    ],
)
def test_no_native_refuses_what_it_turns_off(arguments: tuple[str, ...], why: str) -> None:
    """A page without families of GPUs, or a flag without effect, is a mistake that names both flags."""
    assert mistake("--no-native", *arguments).startswith(f"--no-native: {why}")
    by_variable = mistake(*arguments, GPUMAP_NO_NATIVE="1")
    assert by_variable.startswith(f"--no-native (from $GPUMAP_NO_NATIVE=1): {why}")


def test_choices_that_are_not_known_are_refused() -> None:
    """The message has the word, and what is known; `none` has no other value beside it, and --collect has none."""
    refused("--dialect", "prometheus", '"prometheus"; valid values: native, pod-gpu-map')
    refused("--collect", "everything", '"everything"; valid values: allocation, use, host, accounting')
    assert 'unknown value "a,b"' in mistake("--dialect", "a,b")
    assert mistake("--dialect", "zzz", "--dialect", "native").startswith('--dialect: unknown value "zzz"')
    assert "none cannot be combined" in mistake("--dialect", "none", "--dialect", "native")
    assert "none cannot be combined" in mistake(GPUMAP_DIALECT="native,none")
    assert 'unknown value "none"' in mistake("--collect", "none")


def test_no_push_is_the_opposite_of_push() -> None:
    """On by default; of --push and --no-push the last one counts, and both count before the variable."""
    assert settle().push
    assert not settle("--no-push").push
    assert settle("--no-push", "--push").push
    assert not settle("--push", "--no-push", GPUMAP_PUSH="true").push
    assert settle("--push", GPUMAP_PUSH="0").push
    assert mistake(GPUMAP_PUSH="sometimes") == "--push (from $GPUMAP_PUSH=sometimes): must be true, false, 1 or 0"
    assert "--no-push" in mistake("--no-push=1")


@pytest.mark.parametrize(
    ("flag", "kind", "why"),
    [
        ("--kubelet-socket", "folder", "is a directory, not a socket"),
        ("--kubelet-socket", "file", "is not a socket"),
        ("--pods-api-socket", "file", "is not a socket"),
        ("--proc", "file", "is not a directory"),
        ("--sys", "file", "is not a directory"),
        ("--gpu-fractioning-map", "file", "is not a directory"),
        ("--pod-log-root", "file", "is not a directory"),
        ("--pod-log-root", "socket", "is not a directory"),
        ("--kubelet-root", "file", "is not a directory"),
        ("--device-checkpoint", "folder", "is a directory"),
        ("--device-checkpoint", "pipe", "is not a file"),
        ("--nvml-library", "folder", "is a directory"),
        ("--nvml-library", "socket", "is not a file"),
    ],
)
def test_paths_of_the_wrong_kind_are_refused(paths: Path, flag: str, kind: str, why: str) -> None:
    """A path that can never work is a mistake; the message names flag and path."""
    path = str(paths / kind)
    refused(flag, path, why)
    assert path in mistake(flag, path)


def test_a_root_with_a_wrong_socket_is_refused(paths: Path) -> None:
    """A socket that is found by --kubelet-root, and is none, is reported with the flag that was given."""
    (paths / "pod-resources" / "kubelet.sock").mkdir(parents=True)
    refused("--kubelet-root", str(paths), "pod-resources/kubelet.sock is a directory, not a socket")


def test_a_socket_with_too_long_a_path_is_refused(paths: Path) -> None:
    """No process can connect to a path of more than 107 bytes."""
    refused("--kubelet-socket", f"/{'x' * 107}", "is longer than the maximum of a socket path (107 bytes)")
    refused("--kubelet-root", f"/{'x' * 107}", "is longer than the maximum of a socket path (107 bytes)")
    assert settle("--kubelet-socket", f"/{'x' * 106}")


@pytest.mark.parametrize("flag", ["--proc", "--pod-log-root", "--nvml-library", "--device-checkpoint"])
def test_a_path_that_cannot_be_looked_at_is_a_source_that_is_down(paths: Path, flag: str) -> None:
    """What is missing, forbidden or no path to the system is for the source to report: gpumap starts."""
    assert settle(flag, str(paths / "missing"))
    assert settle(flag, str(paths / "file" / "below"))
    assert settle(flag, "/" + "x" * 300)


def test_namespaces_of_reservations_and_of_trusted_pods() -> None:
    """The whole namespace must match. Without the flag, no pod is trusted."""
    rules = join_settings_of(settle())
    assert [rules.is_reserving(name) for name in ("runai-reservation", "runai-reservation-2", "ml")] == [
        True,
        False,
        False,
    ]
    assert not rules.is_trusted("")
    rules = join_settings_of(settle("--reservation-namespace", "gpu-.+", "--trust-namespace", "ray|slurm"))
    assert [rules.is_reserving(name) for name in ("gpu-pool", "gpu-", "runai-reservation")] == [True, False, False]
    assert [rules.is_trusted(name) for name in ("ray", "slurm", "ray-2")] == [True, True, False]
