"""Finds the modules of gpumap that decode something, from their code, and lists those that decode nothing foreign."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.fuzz.target import SOURCES

_CALL = re.compile(
    "loads?|safe_load|convert|unpack(_from)?|iter_unpack|b64decode|decompressobj|Decoder|(Merge|Parse)?FromString|Parse"
    "|ParseDict|fromisoformat|ip_address|urlsplit|urlparse|parse_qs|unquote|compile|fullmatch|match|search|find(iter|all)"
)
_JSON_DECODE = "json.decode"

_FLAGS = "flags and files of the person who runs gpumap; an error is a line and exit code 2"
NOT_FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "gpumap.agent.settings",
            "gpumap.cli.commands.bill",
            "gpumap.cli.bill.pod_labels",
            "gpumap.cli.parser",
            "gpumap.cli.credentials",
            "gpumap.cli.kubectl.program",
            "gpumap.cli.args",
        ),
        _FLAGS,
    ),
    "gpumap.agent.service": "matches names against the expressions of flags",
    "gpumap.cli.watch": "the keys of the person at the terminal",
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


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)


def parsing_modules() -> Iterator[str]:
    """Return the modules that call a function which decodes, and every module of the sources."""
    for path in SOURCES.rglob("*.py"):
        module = module_name(path)
        if "._proto." in module or module.endswith("__init__"):
            continue
        if path.parent.parts[-2:] == ("agent", "sources") or any(map(_decodes, ast.walk(ast.parse(path.read_text())))):
            yield module


def _decodes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return _CALL.fullmatch(node.func.attr) is not None or ast.unparse(node.func).endswith(_JSON_DECODE)
