"""What each value of the chart means, as rows of a table: from values.yaml, its comments and values.schema.json.

The comment directly above a key is its documentation. A key that holds keys with comments of their own is a head.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "gpumap"
ALTERNATIVES_MAX = 4
"""The comment, or the page that it names, has longer lists."""
_PAGE = re.compile(r"\b(docs/[\w/.-]+\.md)")

Schema = dict[str, Any]


class Value(NamedTuple):
    """A key of values.yaml."""

    name: str  # dotted
    type: str  # valid values, in words; empty for a heading
    default: str  # as JSON
    text: str  # the comment above it; empty where there is none


def read(values: str, schema: Schema) -> Iterator[Value]:
    """Every key of the file, in its order, down to those that have a comment, and their neighbours."""
    node = yaml.compose(values, yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode), "values are a mapping"
    return _below(node, schema, schema, values.splitlines(), "")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each value of the chart; of a head, name and meaning."""
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    for value in read(values, schema):
        text = _PAGE.sub(r"[\1](../../\1)", value.text.replace("<", "&lt;"))
        if value.type:
            yield f"`{value.name}`", value.type, f"`{value.default}`", text
        elif text:
            yield f"**`{value.name}`**", "", "", text


def _below(node: yaml.MappingNode, schema: Schema, root: Schema, lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        name, text = f"{prefix}{key.value}", _comment_above(key, lines)
        known = _resolved(schema["properties"][key.value], root)
        if isinstance(child, yaml.MappingNode) and any(_comment_above(key, lines) for key, _ in child.value):
            yield Value(name, "", "", text)
            yield from _below(child, known, root, lines, f"{name}.")
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(child)), ensure_ascii=False)
            yield Value(name, _type(known, root), default, text)


def _comment_above(key: yaml.Node, lines: list[str]) -> str:
    """The comment that ends in the line above, at the key's own column."""
    mark = " " * key.start_mark.column + "#"
    last = first = key.start_mark.line
    while first and lines[first - 1].startswith(mark):
        first -= 1
    return " ".join(line.removeprefix(mark).strip() for line in lines[first:last]).strip()


def _resolved(schema: Schema, root: Schema) -> Schema:
    """What a `$ref` within the schema means."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return _resolved(found, root)


def _type(schema: Schema, root: Schema) -> str:
    """What the schema allows, in a few words."""
    known = _resolved(schema, root)
    if alternatives := known.get("enum"):
        if len(alternatives) <= ALTERNATIVES_MAX:
            return " or ".join(_word(alternative) for alternative in alternatives)
        return "string"
    if "const" in known:
        return _word(known["const"])
    if known.get("type") == "array":
        return f"list of {_type(known.get('items', {}), root)}s"
    if known.get("type") == "object" and isinstance(known.get("additionalProperties"), dict):
        return f"map of {_type(known['additionalProperties'], root)}s"
    if "type" in known:
        kinds = known["type"]
        return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
    return " or ".join(dict.fromkeys(_type(part, root) for part in known.get("anyOf", ()) or known["oneOf"]))


def _word(value: object) -> str:
    return "empty" if value == "" else f"`{value}`"
