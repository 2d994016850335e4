"""The JSON schema of /api/v1/map, from the declarations in `gpumap.model.map`: part of `make docs`.

msgspec makes the schema from the types. The text below a field in the source is its description.
"""

import ast
import inspect
import json
import textwrap
from typing import Any

import msgspec

from gpumap.model import map as declarations
from gpumap.model.map import VERSION, Entry, NodeMap


def map_schema() -> str:
    """Return the schema as JSON text. Every field is required: an agent always writes all of them."""
    (reference,), definitions = msgspec.json.schema_components([NodeMap], ref_template="#/$defs/{name}")
    root = definitions.pop(reference["$ref"].rpartition("/")[2])
    for name, definition in {**definitions, "NodeMap": root}.items():
        _describe(definition, getattr(declarations, name))
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpumap's map of one node, version {VERSION}",
    }
    parts = {key: root[key] for key in ("description", "type", "properties", "required")}
    return json.dumps({**head, **parts, "$defs": definitions}, indent=2, ensure_ascii=False) + "\n"


def _describe(definition: dict[str, Any], entry: type[Entry]) -> None:
    texts = {name: text for base in reversed(entry.__mro__) for name, text in field_texts(base).items()}
    definition.pop("title", None)
    definition["description"] = inspect.cleandoc(entry.__doc__ or "")
    definition["required"] = list(definition["properties"])
    for name, value in definition["properties"].items():
        value.pop("default", None)
        if name in texts:
            value["description"] = texts[name]


def field_texts(entry: type) -> dict[str, str]:
    """Return the text below each field that a class declares."""
    if not issubclass(entry, Entry):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(entry))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = str(below.value.value)
    return found
