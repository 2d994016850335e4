"""Finds the modules of gpumap that decode something, from their code, and lists those that decode nothing foreign."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.fuzz.target import SOURCES

_CALLS = frozenset(
    [
        "loads",
        "FromString",
        "ParseFromString",
        "MergeFromString",
        "Parse",
        "ParseDict",
        "b64decode",
        "unpack",
        "unpack_from",
        "iter_unpack",
        "convert",
        "Decoder",
        "fromisoformat",
        "urlsplit",
        "urlparse",
        "parse_qs",
        "unquote",
        "compile",
        "fullmatch",
        "match",
        "search",
        "finditer",
        "findall",
        "load",
        "safe_load",
        "ip_address",
        "decompressobj",
    ]
)
_JSON_DECODE = "json.decode"

_FLAGS = "flags and files of the person who runs gpumap; an error is a line and exit code 2"
NOT_FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "gpumap.agent.settings",
            "gpumap.cli.bill.command",
            "gpumap.cli.bill.pod_labels",
            "gpumap.cli.command_line",
            "gpumap.cli.credentials",
            "gpumap.cli.fleet.summary",
            "gpumap.cli.kubectl.commands",
            "gpumap.cli.server_flags",
        ),
        _FLAGS,
    ),
    "gpumap.agent.sources.second_list": "asks a scheduler's agent by `kubelet`, and decodes nothing itself",
    "gpumap.agent.service": "matches names against the expressions of flags",
    "gpumap.cli.live": "the keys of the person at the terminal",
    **dict.fromkeys(
        (
            "gpumap.lab.demo.readings",
            "gpumap.lab.demo.scenario_model",
            "gpumap.lab.demo.scenario_pods",
            "gpumap.lab.demo.allocation",
        ),
        "the scenario of the person who runs the demo",
    ),
    "gpumap.lab.capture.run": "loads a capture by `format`",
}
"""By module: why no target needs to reach it."""


def parsing_modules() -> list[str]:
    """Return the modules that call a function which decodes, and every module of the sources."""
    return sorted(_found())


def _found() -> Iterator[str]:
    root = Path(SOURCES)
    for path in root.rglob("*.py"):
        module = path.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".")
        if "._proto." in module or module.endswith("__init__"):
            continue
        if path.parent.name == "sources" or any(map(_decodes, ast.walk(ast.parse(path.read_text())))):
            yield module


def _decodes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in _CALLS or ast.unparse(node.func).endswith(_JSON_DECODE)
