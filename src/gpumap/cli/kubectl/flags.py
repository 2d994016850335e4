"""kubectl's own flags that say which cluster is asked, and as whom: they are passed on as they are given."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

from gpumap.model.errors import UsageError
from gpumap.model.units import parse_duration

_TIMEOUT = "30s"


class KubectlFlag(NamedTuple):
    """As `kubectl options` has it. `metavar` is empty for a switch."""

    name: str
    metavar: str
    help: str
    short: str = ""
    repeatable: bool = False

    @property
    def variable(self) -> str:
        """Its place in a namespace, apart from gpumap's own flags."""
        return "kubectl_" + self.name.removeprefix("--").replace("-", "_")


KUBECTL_FLAGS = (
    KubectlFlag("--context", "NAME", "the context of the kubeconfig; else its current one"),
    KubectlFlag("--kubeconfig", "FILE", "the kubeconfig; else $KUBECONFIG or ~/.kube/config"),
    KubectlFlag("--cluster", "NAME", "the kubeconfig's cluster"),
    KubectlFlag("--user", "NAME", "the kubeconfig's user"),
    KubectlFlag("--server", "URL", "the API server", short="-s"),
    KubectlFlag("--token", "TOKEN", "a bearer token"),
    KubectlFlag("--as", "NAME", "ask as another user"),
    KubectlFlag("--as-group", "NAME", "ask as one of a group; repeatable", repeatable=True),
    KubectlFlag("--as-uid", "UID", "ask as a UID"),
    KubectlFlag("--certificate-authority", "FILE", "the certificate that is trusted"),
    KubectlFlag("--client-certificate", "FILE", "the certificate to show"),
    KubectlFlag("--client-key", "FILE", "its key"),
    KubectlFlag("--tls-server-name", "NAME", "the name in the server's certificate"),
    KubectlFlag("--insecure-skip-tls-verify", "", "trust any certificate"),
    KubectlFlag("--cache-dir", "DIR", "kubectl's cache"),
    KubectlFlag("--request-timeout", "DURATION", f"for each request, such as 30s; 0: for ever (default: {_TIMEOUT})"),
)
_FOR_EVER = re.compile(r"0+[smh]?", re.ASCII)


def add_kubectl_flags(parser: argparse.ArgumentParser) -> None:
    """Add them to a command, as kubectl's own."""
    group = parser.add_argument_group("which cluster, and as whom: kubectl's own flags, passed on")
    for flag in KUBECTL_FLAGS:
        names = [flag.short, flag.name] if flag.short else [flag.name]
        if not flag.metavar:
            group.add_argument(*names, dest=flag.variable, action="store_true", help=flag.help)
        elif flag.repeatable:
            group.add_argument(*names, dest=flag.variable, metavar=flag.metavar, action="append", help=flag.help)
        else:
            group.add_argument(*names, dest=flag.variable, metavar=flag.metavar, help=flag.help)


def passed_on(given: argparse.Namespace) -> tuple[str, ...]:
    """The words for kubectl."""
    return tuple(_words(given))


def _words(given: argparse.Namespace) -> Iterator[str]:
    for flag in KUBECTL_FLAGS:
        value = getattr(given, flag.variable)
        if not flag.metavar:
            if value:
                yield flag.name
        else:
            for one in value or () if flag.repeatable else () if value is None else (value,):
                yield f"{flag.name}={one}"


def request_seconds(given: argparse.Namespace) -> float | None:
    """The deadline of each request; None where there is none. Read as kubectl does: seconds need no unit."""
    text: str = _TIMEOUT if given.kubectl_request_timeout is None else given.kubectl_request_timeout
    if _FOR_EVER.fullmatch(text):
        return None
    try:
        return parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise UsageError(f"--request-timeout {text}: {error}") from error
