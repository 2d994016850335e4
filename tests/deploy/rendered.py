"""Rendered manifests that are kept as files and compared byte for byte: `make golden` writes them again.

Of rules and boards they have only the heads: `test_chart_rules` compares the rest with the chart's own files.
"""

from __future__ import annotations

import re
from pathlib import Path

import gpumap
from tests.deploy.chart import render_text
from tests.deploy.chart_variations import RENDERED, VARIATIONS

FOLDER = Path(__file__).with_name("rendered")
_BODY = re.compile(r"^(kind: (?:ConfigMap|PrometheusRule)$.*?)^(?:data|spec):.*?(?=^---$|\Z)", re.MULTILINE | re.DOTALL)


def manifests(variation: str) -> str:
    """Render a variation. The version of gpumap is left out: a release changes no file.

    Only the defaults have the labels of GPU nodes: `test_chart_nodes` tries these with nodes.
    """
    every_node = ("gpuNodesOnly=false",) if variation != "defaults" else ()
    text = render_text(*every_node, *VARIATIONS[variation], release="prod").replace(gpumap.__version__, "VERSION")
    return _BODY.sub(r"\1", text)


def path_of(variation: str) -> Path:
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', variation.lower())}.yaml"


def main() -> None:
    """Write every file again."""
    for path in FOLDER.glob("*.yaml"):
        path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for variation in RENDERED:
        path_of(variation).write_text(manifests(variation), encoding="utf-8")


if __name__ == "__main__":
    main()
