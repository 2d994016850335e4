"""Sphinx's configuration for `make site`. The site needs no other host, and a link that leads nowhere fails the build.

The documents have no directives, because GitHub shows them too. This file adds the contents to the first page, and
links files that are no pages to the repository.
"""

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent
OWNER = re.findall(r"^OWNER=(.+)$", (ROOT / "release.env").read_text(encoding="utf-8"), re.MULTILINE)[0]
REPOSITORY = f"https://github.com/{OWNER}/gpumap"
CONTENTS = {
    "Documentation": ["docs/README"],
    "Tutorials": ["docs/tutorial/demo", "docs/tutorial/cluster"],
    "How to": ["docs/how-to/*", "docs/how-to/*/*"],
    "Reference": ["docs/reference/*", "charts/gpumap/README", "deploy/README"],
    "Explanation": ["docs/explanation/*"],
    "Runbooks": ["docs/runbooks/README", "docs/runbooks/*"],
    "Development": ["CONTRIBUTING", "docs/dev/*", "tests/captures/README", "SECURITY", "CODE_OF_CONDUCT", "CHANGELOG"],
}

project = "gpumap"
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "charts/gpumap/README.md", "deploy/README.md", "tests/captures/README.md"]
exclude_patterns = [".*", "build", "src"]  # Sphinx does not search these folders
root_doc = "README"
myst_heading_anchors = 6
suppress_warnings = ["misc.highlighting_failure"]  # Pygments does not know all of PromQL
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False


class LinkRepository(SphinxTransform):
    """Link files and folders that are no pages to the repository, which the site does not copy."""

    default_priority = 10

    def apply(self) -> None:
        for node in [*self.document.findall(lambda node: isinstance(node, download_reference | pending_xref))]:
            target = node["reftarget"]
            path = (ROOT / self.env.docname).parent.joinpath(target).resolve()
            if node.get("refdomain") == "doc" and target not in self.env.found_docs:
                path = ROOT / f"{target}.md"
            if path.exists():
                address = f"{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT)}"
                node.replace_self(nodes.reference("", "", *node.children, refuri=address))


def add_contents(_: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        for title, pages in CONTENTS.items():
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def copy_files(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that HTML in the documents names, and the first page to where a host looks for it."""
    if error is None:
        shutil.copytree(ROOT / "docs/pictures", app.outdir / "docs/pictures", dirs_exist_ok=True)
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.add_transform(LinkRepository)
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_files)
