"""The chart's README says what values.yaml says; `make docs` brings it in line."""

import json
import re
import shlex

import pytest
import yaml

from scripts.chart_values import CHART, Value, read
from tests.deploy.chart import Manifest, helm
from tests.fences import read_blocks

README = (CHART / "README.md").read_text(encoding="utf-8")
VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(name="values")
def read_values() -> tuple[Value, ...]:
    return tuple(read(VALUES, SCHEMA))


def test_every_value_is_documented(values: tuple[Value, ...]) -> None:
    """A comment is directly above each key; a head with comments on its keys needs none."""
    assert [value.name for value in values if value.type and not value.text] == []


def leaves(values: Manifest, heads: set[str], prefix: str = "") -> dict[str, object]:
    """The values themselves, by their dotted names."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if prefix + name in heads:
            found |= leaves(value, heads, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def test_the_table_has_every_value_with_its_default(values: tuple[Value, ...]) -> None:
    """The README's rows are the keys of values.yaml, none more and none missing, and their defaults are true."""
    heads = {value.name for value in values if not value.type}
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| `(.+?)` \| [^|]", README, re.MULTILINE)
    assert {name: json.loads(default) for name, default in rows} == leaves(yaml.safe_load(VALUES), heads)
    assert len(rows) == len({name for name, _ in rows})


def test_a_value_is_told_with_its_type_default_and_comment() -> None:
    """A comment belongs to the key below it, at that key's own column; what is in a value is no key."""
    values = """\
# Of the file.

# Of a,
# on two lines.
a: ""
b:
  # Of c.
  c: [1]
  # Of e, not of f.
  e:
    f: yes
g: 1
"""
    properties = {
        "a": {"enum": ["", "x"]},
        "b": {"$ref": "#/definitions/b"},
        "g": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    of_b = {"c": {"type": "array", "items": {"type": "integer"}}, "e": {"type": "object"}}
    schema = {"properties": properties, "definitions": {"b": {"type": "object", "properties": of_b}}}
    assert list(read(values, schema)) == [
        Value("a", "empty or `x`", '""', "Of a, on two lines."),
        Value("b", "", "", ""),
        Value("b.c", "list of integers", "[1]", "Of c."),
        Value("b.e", "object", '{"f": true}', "Of e, not of f."),
        Value("g", "integer or string", "1", ""),
    ]


def test_the_install_command_works() -> None:
    """`helm install` as the README writes it is taken, and asks for a ServiceMonitor."""
    blocks = "".join(block.body for block in read_blocks(README, "console"))
    (command,) = re.findall(r"^\$ helm (install (?:.*\\\n)*.*)$", blocks, re.MULTILINE)
    words = [word if word != "charts/gpumap" else str(CHART) for word in shlex.split(command.replace("\\\n", ""))]
    done = helm(*words, "--dry-run=client")
    assert done.returncode == 0, done.stderr
    assert "kind: ServiceMonitor" in done.stdout
    assert 'image: "registry.example.com/gpumap:' in done.stdout
