"""What a row expects of a page, in the text that `make faults` prints.

| text | meaning |
|---|---|
| `gpumap_source_up{source="kubelet"} 0` | samples with these labels exist, and each has this value |
| `gpumap_allocation_info{pod="idle"} absent` | no sample has these labels |
| `gpumap_gpu_up present` | a sample has these labels, whatever its value |
| `gpumap_allocation_info unchanged` | the samples are those of before the fault, with their values |
| `gpumap_source_errors_total{source="kubelet"} rises` | the sum is larger than before the fault |
| `/readyz 503` | the status of this path |
"""

from __future__ import annotations

import re

from tests.exposed import Page

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (absent|present|unchanged|rises|[-+.\w]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"(?:,|$)')
_ESCAPED = re.compile(r"\\[n\\\"]")
_CHARACTERS = {r"\n": "\n", r"\\": "\\", r"\"": '"'}
_PATH = re.compile(r"(/\S*) (\d{3})")


def path_and_status(line: str) -> tuple[str, int] | None:
    """The path of a line on a status, and that status."""
    match = _PATH.fullmatch(line)
    return (match[1], int(match[2])) if match else None


def holds(line: str, before: Page, page: Page) -> bool:
    """Whether a page is as a line on samples says. Raises ValueError if the line is not of this form."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError(f'{line!r} is not of the form NAME{{LABEL="VALUE"}} WHAT')
    name, labels, what = match.groups()
    found = _LABEL.findall(labels or "")
    if labels and ",".join(f'{key}="{value}"' for key, value in found) != labels:
        raise ValueError(f'{line!r}: labels are not of the form LABEL="VALUE",…')
    wanted = {key: _ESCAPED.sub(lambda match: _CHARACTERS[match[0]], value) for key, value in found}
    was, now = (_samples(one, name, wanted) for one in (before, page))
    match what:
        case "absent":
            return not now
        case "present":
            return bool(now)
        case "unchanged":
            if not was:
                raise ValueError(f"{line!r}: the page had no such sample before the fault")
            return now == was
        case "rises":
            return sum(now.values()) > sum(was.values())
    return bool(now) and set(now.values()) == {float(what)}


def shown(line: str, page: Page) -> str:
    """What a page has of the family of a line, for the message of a failed test."""
    rows = page.samples.get(line.partition("{")[0].partition(" ")[0], {})
    return ", ".join(f"{dict(row)}: {value:g}" for row, value in rows.items()) or "absent"


def matches(pattern: str, line: str) -> bool:
    """Whether a line of the log has this text; `…` is any text."""
    return re.search(".*".join(map(re.escape, pattern.split("…"))), line) is not None


def _samples(page: Page, name: str, labels: dict[str, str]) -> dict[frozenset[tuple[str, str]], float]:
    return {row: value for row, value in page.samples.get(name, {}).items() if row >= labels.items()}
