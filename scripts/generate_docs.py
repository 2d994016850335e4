"""Write the tables of docs/reference/{metrics,flags,dialects}.md and the chart's README.

`make docs` runs it.

The tables come from the code. They are between two comments of each page; the prose around them is written by hand.
In docs/reference/sizing.md and docs/explanation/cost.md it writes the numbers of passages.
The schema of /api/v1/map is copied.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import DEFAULT_GROUPS, FLAGS, Flag
from gpumap.agent.metrics import GROUPS, PROCESSES, self_families
from gpumap.model.families import Family, NumberedFamilies
from scripts import chart_values
from scripts.map_schema import map_schema
from tests.docs import sized

DOCS = Path(__file__).resolve().parent.parent / "docs"
_GENERATED = re.compile(r"(?<=-->\n).*?(?=<!-- end of what is generated -->)", re.DOTALL)

GROUP_TITLES = {
    "allocation": "Allocation: reported by the kubelet",
    "use": "Use: measured",
    "host": "Processes outside pods: measured",
    "accounting": "Accounting: counters for chargeback",
    "findings": "Findings: what is wrong, decided by gpumap",
    "device": "Devices and GPUs",
    "health": "Health of GPUs",
    "links": "PCIe and NVLink",
    "gpm": "GPM: activity of the units of a device, on Hopper and later",
    "codec": "Video encoders and decoders",
}


def metrics() -> str:
    """The native families, group by group, and those on gpumap itself."""
    parts = []
    for group, families in GROUPS.items():
        default = "" if group in DEFAULT_GROUPS else ", off by default"
        parts += [f"## {GROUP_TITLES[group]} (`{group}`{default})", _families(families)]
    parts += ["## By process (`--process-metrics`, off by default: a series for each process)", _families(PROCESSES)]
    parts += ["## gpumap itself (always)", _families(self_families("", ""))]
    parts += ["Also `process_*`, as in every Prometheus client: CPU, memory, file descriptors, start time."]
    return "\n\n".join(parts)


def flags() -> str:
    """Every flag of `serve`."""
    rows = [(_flag(flag), _default(flag), _meaning(flag)) for flag in FLAGS]
    return _table(("flag", "default", "meaning"), rows)


def dialects() -> str:
    """The families of each dialect; those with the same labels on the same pages share a row."""
    rows = [("`native`", "`gpumap_*`", "see [metrics.md](metrics.md)", "`/metrics`")]
    for name, dialect in DIALECTS.items():
        pages_by_family: dict[Family | NumberedFamilies, list[str]] = {}
        for path, families in {"/metrics": dialect.families, **dialect.pages("NODE")}.items():
            for family in families:
                pages_by_family.setdefault(family, []).append(path)
        names: dict[tuple[str, str], list[str]] = {}
        for family, paths in pages_by_family.items():
            # The dialect makes the node's name a valid one: put the placeholder back.
            shown = f"`{family.name.replace('NODE', '<node>')}`{' (counter)' * (family.kind == 'counter')}"
            names.setdefault((_codes(family.labels), _codes(paths)), []).append(shown)
        rows += [(f"`{name}`", "<br>".join(shown), labels, where) for (labels, where), shown in names.items()]
    table = _table(("dialect", "families (gauges, if not marked)", "labels", "pages"), rows)
    default = "By default only `native` is on. `--no-native` turns it off."
    return f"{table}\n\n{default}"


def values() -> str:
    """Every value of the chart."""
    return _table(("value", "type", "default", "meaning"), chart_values.rows())


PAGES: dict[str, Callable[[], str]] = {
    "../charts/gpumap/README.md": values,
    "reference/metrics.md": metrics,
    "reference/flags.md": flags,
    "reference/dialects.md": dialects,
}
NUMBERS: dict[str, Callable[[], sized.Passages]] = {
    "reference/sizing.md": sized.sizing,
    "explanation/cost.md": sized.cost,
}
_NUMBER = r"\d+(?: \d{3})*(?:\.\d+)?"
SCHEMA = DOCS.parent / "src" / "gpumap" / "model" / "map.schema.json"
"""docs/reference/map.schema.json is a link to it."""


def with_tables(name: str) -> str:
    """Give a page as it should be: its prose as it is, its tables as the code has them."""
    page = (DOCS / name).read_text(encoding="utf-8")
    tables = f"\n{PAGES[name]()}\n\n"
    page, number = _GENERATED.subn(lambda _: tables, page)
    if number != 1:
        raise ValueError(f"{name}: the comments around what is generated are missing")
    return page


def with_numbers(name: str) -> str:
    """Give a page as it should be: its words as they are, its numbers as the code has them."""
    return replace_numbers((DOCS / name).read_text(encoding="utf-8"), NUMBERS[name]())


def replace_numbers(page: str, passages: sized.Passages) -> str:
    """Write the numbers of each passage. Raises ValueError if the page does not have its words once."""
    for passage, numbers in passages.items():
        words = r"\s+".join(map(re.escape, passage.split())).split(re.escape("{}"))
        matches = list(re.finditer(f"({f'){_NUMBER}('.join(words)})", page))
        if len(matches) != 1:
            raise ValueError(f"{passage!r} must be there once, with a number for each {{}}")
        text, *rest = matches[0].groups()
        text += "".join(f"{number}{between}" for number, between in zip(numbers, rest, strict=True))
        page = page[: matches[0].start()] + text + page[matches[0].end() :]
    return page


def _families(families: Iterable[Family]) -> str:
    rows = [(f"`{family.name}`", _codes(family.labels), family.help) for family in families]
    return _table(("name", "labels", "meaning"), rows)


def _flag(flag: Flag) -> str:
    return " ".join(f"`{word}`" for word in (f"{flag.name} {flag.metavar}".strip(), flag.opposite) if word)


def _default(flag: Flag) -> str:
    return f"`{flag.default}`" if flag.default else ""


def _meaning(flag: Flag) -> str:
    text = flag.help.replace("<", "&lt;")
    return f"{text} (repeatable)" if flag.repeatable else text


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(with_tables(name), encoding="utf-8")
    for name in NUMBERS:
        (DOCS / name).write_text(with_numbers(name), encoding="utf-8")
    SCHEMA.write_text(map_schema(), encoding="utf-8")
