"""Check the English of documents, docstrings, comments and messages: `make prose`, a part of `make check`.

It reports sentences of more than 30 words, and words that CONTRIBUTING.md replaces. `--count` prints the number of
words and the length of sentences instead.

    python -m scripts.check_prose [--count] [FILE …]
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 30
"""Words of a sentence."""
REPLACED = {
    r"tells?|told|telling": "report, show, return, know",
    r"stands?|stood|standing(?! state)": "is, exists, is listed",
    r"whom|whoever": "name the actor",
    r"nobody|somebody": "name the actor: no process, no pod, someone",
    r"likewise": "also",
    r"besides": "also, except",
    r"anew": "again",
    r"as ever|as it comes|of none|no more(?= *[.,;:)]|$)": "plain words",
    r"(?:lets?|letting) go": "release",
    r"(?:gives?|given|gave) away": "assign",
    r"hears?|heard": "receive",
    r"says? (?:of|nothing)|said of": "report",
    r"(?:is|are|was|were)(?: not| still| no longer)? there(?= *[.,;:)]|$)": "exists, is present",
    r"alone(?= *[.,;:)]|$)": "only",
    r"silent|silence(?! (?:it|a|their|by)\b)|deaf": "does not answer, closed",
    r"who is": "name the actor",
}
"""What style replaces, and by what."""
_WORDS = [
    (re.compile(rf"(?<![\w`/.-])(?:{pattern})(?![\w`/=-])", re.IGNORECASE), by) for pattern, by in REPLACED.items()
]
_SENTENCE = re.compile(r"(?<=[.!?:;])[\"')*]*\s+(?=[A-Z`\"'(*0-9])|(?<=[.!?])\s+")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|no|St|Fig)\.(?=\s)", re.IGNORECASE)
_SYMBOLS = re.compile(r"`+[^`]*`+")
_SKIPPED = ("src/gpumap/agent/_proto/", "scripts/check_prose.py", "charts/gpumap/templates/_nodes.tpl")
"""Generated code, this file, which contains the words, and a table in a comment."""
_QUOTED = ("A metric with a constant '1' value labeled by ",)
"""How texts of other projects begin, which dialects repeat word for word."""


class Text(NamedTuple):
    """A paragraph, a cell, a docstring or a message, and where it begins."""

    file: str
    line: int
    words: str


# --- where texts are --------------------------------------------------------------------------------------------------


def texts(file: str) -> Iterator[Text]:
    """Yield the texts of a file of the project."""
    readers = {".md": _markdown, ".py": _python, ".txt": _markdown, ".yaml": _yaml, ".js": _script, ".tpl": _template}
    body = (ROOT / file).read_text(encoding="utf-8")
    for line, words in readers[Path(file).suffix](body):
        yield Text(file, line, words)


def _markdown(body: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items of lists, headings and cells of tables; no code."""
    body = re.sub(r"^( *)(```|~~~).*?^ *\2 *$", lambda code: "\n" * code[0].count("\n"), body, flags=re.M | re.S)
    body = re.sub(r"<!--.*?-->|<[^>`]*>|\{\{.*?\}\}", lambda tag: "\n" * tag[0].count("\n"), body, flags=re.S)
    start, kept = 1, list[str]()
    for number, line in enumerate([*body.split("\n"), ""], start=1):
        text = line.strip()
        begins = re.match(r"([-*+]|\d+\.) |#|>|\|", text)
        if kept and (not text or begins):
            yield start, " ".join(kept)
            kept = []
        if text.startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", text) if re.search("[a-z]", cell))
        elif text.startswith("#"):
            yield number, text.lstrip("# ")
        elif text:
            start = start if kept else number
            kept.append(re.sub(r"^(([-*+]|\d+\.) |> ?)", "", text))


def _python(body: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments."""
    tree = ast.parse(body)
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            yield from _message(node.lineno, "".join(_part(value) for value in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield from _message(node.lineno, node.value)
    yield from _comments(body)


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "`x`"


def _message(line: int, value: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text. Indented lines are examples, code or tables: no sentences."""
    value = inspect.cleandoc(value)
    if len(re.findall(r"[A-Za-z]{2,}", value)) > 2 and " " in value and not value.startswith(_QUOTED):
        kept = "\n".join("" if re.match(r"  +[^ *-]|.*\S   +\S", one) else one for one in value.split("\n"))
        for place, words in _markdown(kept):
            yield line + place - 1, words


def _comments(body: str) -> Iterator[tuple[int, str]]:
    start, kept = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(body).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#( ---|!|:| noqa| type:| ruff)", token.string):
            start = start if kept else token.start[0]
            kept.append(token.string.lstrip("# "))
        elif kept and token.type not in (tokenize.NL, tokenize.COMMENT):
            yield start, " ".join(kept)
            kept = []


def _yaml(body: str) -> Iterator[tuple[int, str]]:
    """Yield comments, and the summaries and descriptions of alerts."""
    yield from _hashed(body)
    if not body.lstrip().startswith(("#", "groups:")) or "\ngroups:" not in f"\n{body}":
        return  # no rules
    for node in _mappings(yaml.compose(body)):
        for key, value in node.value:
            if key.value in ("summary", "description", "message", "title"):
                yield value.start_mark.line + 1, re.sub(r"\{\{.*?\}\}", "`x`", str(value.value))


def _mappings(node: yaml.Node | None) -> Iterator[yaml.MappingNode]:
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for one in node.value:
            yield from _mappings(one)


def _hashed(body: str) -> Iterator[tuple[int, str]]:
    start, kept = 1, list[str]()
    for number, line in enumerate([*body.split("\n"), ""], start=1):
        comment = re.match(r" *#+ ?(?!---)(.*)", line)
        if comment and comment[1].strip():
            start = start if kept else number
            kept.append(comment[1].strip(" -"))
        elif kept:
            yield start, " ".join(kept)
            kept = []


def _script(body: str) -> Iterator[tuple[int, str]]:
    """Yield comments and texts of the page's scripts."""
    for number, line in enumerate(body.split("\n"), start=1):
        if re.match(r"\s*(//|\*|/\*)", line):
            yield number, re.sub(r"^[\s/*]+|\s*\*/$", "", line)
        else:
            for found in re.findall(r"\"([^\"]*)\"|`([^`]*)`|'([^']*)'", line):
                text = re.sub(r"\$\{.*?\}", "x", "".join(found))
                if len(re.findall(r"[A-Za-z]{2,}", text)) > 2:
                    yield number, text


def _template(body: str) -> Iterator[tuple[int, str]]:
    """Yield comments of a template of the chart, and the sentences that it prints or fails with."""
    for comment in re.finditer(r"\{\{-? */\*(.*?)\*/ *-?\}\}", body, re.S):
        yield body.count("\n", 0, comment.start()) + 1, " ".join(comment[1].split())
    for quoted in re.finditer(r"\"((?:[^\"\\\n]|\\.){20,})\"", body):
        yield body.count("\n", 0, quoted.start()) + 1, quoted[1]


# --- what is wrong with them ------------------------------------------------------------------------------------------


def sentences(words: str) -> list[str]:
    """Return the sentences of a text, with one word for each piece of code or address."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", _SYMBOLS.sub("Code", words))
    plain = re.sub(r"https?://\S+", "Address", _ABBREVIATION.sub(r"\1", plain)).replace("**", "")
    return [one for one in _SENTENCE.split(plain) if re.search(r"[A-Za-z]{2}", one)]


def count(sentence: str) -> int:
    """Return the number of words."""
    return len(re.findall(r"[\w'’/.-]*\w[\w'’/.-]*", sentence))


def mistakes(text: Text) -> Iterator[str]:
    """Yield what is wrong with a text, a line each."""
    place = f"{text.file}:{text.line}"
    for sentence in sentences(text.words):
        if (length := count(sentence)) > LONGEST and re.search("[,.;:?]", sentence):  # else a list of words
            yield f"{place}: {length} words in one sentence: {sentence[:90]}…"
    plain = _SYMBOLS.sub("``", text.words)
    for pattern, by in _WORDS:
        for found in pattern.finditer(plain):
            around = text.words[max(found.start() - 30, 0) : found.end() + 20]
            yield f"{place}: “{found[0]}” ({by}): …{around}…"


def files() -> list[str]:
    """Return the project's files that have English."""
    kinds = ("**/*.md", "src/**/*.py", "src/**/*.js", "src/**/*.yaml", "scripts/*.py", "boards/*.py", "bench/*.py")
    more = ("charts/**/*.yaml", "charts/**/*.tpl", "charts/**/*.txt", "deploy/**/*.yaml")
    listed = subprocess.run(
        ["git", "ls-files", "--", *(f":(glob){one}" for one in (*kinds, *more))],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return sorted({one for one in listed if not one.startswith(_SKIPPED) and not (ROOT / one).is_symlink()})


def main(arguments: Sequence[str]) -> int:
    """Print the mistakes; return 1 if there are any."""
    chosen = [one for one in arguments if one != "--count"] or files()
    found = [text for one in chosen for text in texts(one)]
    if "--count" in arguments:
        _print_lengths(found)
        return 0
    wrong = [line for text in found for line in mistakes(text)]
    print("\n".join(wrong) or f"{len(found)} texts of {len(chosen)} files are plain", flush=True)
    return int(bool(wrong))


def _print_lengths(found: Sequence[Text]) -> None:
    lengths = [count(one) for text in found for one in sentences(text.words)]
    whole = [one for one in lengths if one > 3]
    ninth = statistics.quantiles(whole, n=10)[-1]
    print(f"{sum(lengths)} words; sentences: mean {statistics.mean(whole):.1f}, 90th percentile {ninth:.0f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
