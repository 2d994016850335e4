"""Reads the text of a YAML document. A mistake is a `ScenarioError` of one line that names the line of the text."""

from __future__ import annotations

from collections.abc import Hashable

import yaml

VALUES_MAX = 100_000
"""Keys and values of a document, aliases spelled out: a short text may mean more than a machine can hold."""


class ScenarioError(ValueError):
    """A mistake in a scenario. Its message is one line for the person who wrote it."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses equal keys, of which PyYAML silently takes the last, and keys without a value.

    It counts an alias as all values that it repeats. Merges (`<<`) repeat them too.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._sizes: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, first = self.peek_event(), self._values  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        # An alias in its own value has no size yet.
        self._values += self._sizes.get(node, VALUES_MAX) if isinstance(event, yaml.AliasEvent) else 1
        if self._values > VALUES_MAX:
            raise ScenarioError(f"line {event.start_mark.line + 1}: more than {VALUES_MAX} values, counting aliases")
        self._sizes[node] = self._values - first
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen_keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen_keys:
                    raise ScenarioError(f'line {key.start_mark.line + 1}: key "{key.value}" is set twice')
                if value.tag == "tag:yaml.org,2002:null":
                    raise ScenarioError(f'line {key.start_mark.line + 1}: key "{key.value}" has no value')
                seen_keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> object:
    """The one document in `text`."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark else ""
        raise ScenarioError(f"{place}not YAML: {error.problem or error.context}") from error
    except ScenarioError:
        raise
    except (LookupError, TypeError, AttributeError) as error:  # PyYAML at values that do not fit their tag
        raise ScenarioError("not YAML: a value does not fit its tag") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ScenarioError(f"not YAML: {' '.join(str(error).split())}") from error
    finally:
        if loader is not None:
            loader.dispose()
