"""The JSON schema of /api/v1/map, from the declarations in `gpumap.model.node`: part of `make docs`.

msgspec makes the schema from the types. The text below a field in the source is its description.
"""

import ast
import inspect
import json
import textwrap
from typing import Any

import msgspec

from gpumap.agent.published import NOT_PUBLISHED
from gpumap.model import names, node, readings
from gpumap.model.node import VERSION, Node

TYPES = {**vars(names), **vars(readings), **vars(node)}


def map_schema() -> str:
    """Return the schema as JSON text. Every field is required that an agent always writes."""
    (reference,), definitions = msgspec.json.schema_components([Node], ref_template="#/$defs/{name}")
    for kind, fields in NOT_PUBLISHED.items():
        for field in fields:
            del definitions[kind.__name__]["properties"][field]
    root = definitions.pop(reference["$ref"].rpartition("/")[2])
    definitions = {name: definitions[name] for name in _used({"Node": root, **definitions}) if name in definitions}
    for name, definition in {**definitions, "Node": root}.items():
        _describe(definition, TYPES[name])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpumap's map of one node, version {VERSION}",
    }
    parts = {key: root[key] for key in ("description", "type", "properties", "required")}
    return json.dumps({**head, **parts, "$defs": definitions}, indent=2, ensure_ascii=False) + "\n"


def _used(definitions: dict[str, Any]) -> list[str]:
    """Return the names of the definitions that the node consists of."""
    found, todo = set[str](), ["Node"]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            text = json.dumps(definitions[name])
            todo += [other for other in definitions if f'"#/$defs/{other}"' in text]
    return sorted(found)


def _describe(definition: dict[str, Any], described: Any) -> None:
    definition.pop("title", None)
    definition["description"] = inspect.cleandoc(described.__doc__ or "")
    if "properties" not in definition:
        return
    texts = {name: text for base in reversed(described.__mro__) for name, text in field_texts(base).items()}
    writes_all = not described.__struct_config__.omit_defaults
    definition["required"] = list(definition["properties"]) if writes_all else definition.get("required", [])
    for name, value in definition["properties"].items():
        value.pop("default", None)
        if name in texts:
            value["description"] = texts[name]


def field_texts(described: type) -> dict[str, str]:
    """Return the text below each field that a class declares."""
    if described.__module__ == "builtins" or not issubclass(described, msgspec.Struct) or described is msgspec.Struct:
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(described))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = str(below.value.value)
    return found
