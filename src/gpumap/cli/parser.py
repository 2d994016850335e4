"""The command line's grammar: parsers that report a mistake in one line and suggest the nearest valid word.

This module knows argparse, but not what the commands do.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from gpumap.model.errors import UsageError

LINE_COLUMNS_MAX = 110
WORD_FIELDS = ("gpu", "uuid", "model", "xid", "ns", "pod", "container", "owner", "finding")
"""What comes before the colon of a WORD. `gpu`, `xid` and `finding` test the whole value, the others a part of it."""
WORD_COMMANDS = ("map", "top", "waste")
Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake, instead of ending the process.

    `seldom`: titles of groups of flags that only --help-all shows.
    """

    seldom: tuple[str, ...] = ()
    help_all: argparse.Action

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument ").replace("expected one argument", "requires a value"))

    def format_help(self) -> str:
        """Return the help without the groups of flags that are seldom used."""
        groups = self._action_groups
        self._action_groups = [group for group in groups if group.title not in self.seldom]
        try:
            return super().format_help()
        finally:
            self._action_groups = groups


class _HelpAll(argparse.Action):
    """--help-all prints the help with every flag. --help lists it only if it shows more than --help."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(end=argparse.ArgumentParser.format_help(parser))
        parser.exit()


def leave_to_help_all(parser: Parser, *titles: str) -> None:
    """Make --help shorter: only --help-all shows these groups of flags."""
    parser.seldom = titles
    parser.help_all.help = "Show all flags and exit."


class _Format(argparse.RawDescriptionHelpFormatter):
    """Wrap the help to the width of the terminal, at most LINE_COLUMNS_MAX, with room for the flags."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size().columns, LINE_COLUMNS_MAX)
        super().__init__(prog, max_help_position=30, width=columns - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs that are too wide. Indented lines are examples: users copy commands, so they stay whole."""
        lines: list[str] = []
        for is_text, group in itertools.groupby(text.splitlines(), lambda line: line != "" and line[0] != " "):
            paragraph = list(group)
            too_wide = is_text and max(map(len, paragraph)) > width
            lines += textwrap.wrap(" ".join(paragraph), width, break_on_hyphens=False) if too_wide else paragraph
        return "\n".join(lines)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # argparse ignores the indent of commands


def top_parser(description: str, epilog: str, version: str, program: str = "gpumap") -> Parser:
    """Return the parser of `gpumap` itself, or of another program that has commands."""
    parser = Parser(
        prog=program,
        usage=f"{program} COMMAND [flags]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=_Format,
    )
    parser.add_argument("--version", action="version", version=version)
    return parser


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    run: Run,
    *,
    summary: str,
    details: str = "",
    examples: Sequence[tuple[str, str]] = (),
    usage: str = "[flags]",
) -> Parser:
    """Add a command. `summary` is its line in the list. Its own help has `details` and the (what, command) examples."""
    example_text = "\n\n".join(f"  # {purpose}\n  {command}" for purpose, command in examples)
    parser = commands.add_parser(
        name,
        help=summary,
        usage=f"{commands._prog_prefix} {name} {usage}".rstrip(),
        description=summary + (details and f"\n\n{details}"),
        epilog=f"examples:\n{example_text}" if example_text else None,
        allow_abbrev=False,
        formatter_class=_Format,
    )
    parser.help_all = parser.add_argument("--help-all", action=_HelpAll)
    parser.set_defaults(run=run, command=name)
    return parser


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a reader of a word that must be one of these. Its error suggests the nearest one."""

    def choose(text: str) -> str:
        if text not in choices:
            known = ", ".join(choices)
            raise argparse.ArgumentTypeError(
                f'unknown value "{text}"; valid values: {known}{did_you_mean(text, choices)}'
            )
        return text

    return choose


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises UsageError."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    commands: dict[str, Parser] = {
        name: subparser for subparsers in groups for name, subparser in subparsers.choices.items()
    }
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] == ["version"]:
        arguments = ["--version", *arguments[1:]]
    first = next((word for word in arguments if not word.startswith("-")), None)
    if first is not None and first not in commands:
        raise UsageError(_no_command(first, arguments, commands, parser))
    arguments = _join_negative_values(arguments, flags_of(commands[first]) if first is not None else ())
    args, unknown = parser.parse_known_args(arguments)
    if hasattr(args, "words"):  # argparse takes those after a flag for unknown
        args.words += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        chosen = commands[first] if first is not None else parser
        raise UsageError(_unknown(arguments, unknown, chosen))
    return args


def _join_negative_values(arguments: Sequence[str], flags: Iterable[argparse.Action]) -> list[str]:
    """Join a flag and a value such as -5m. Otherwise argparse takes the value for a flag, and its error is unclear."""
    valued = {option for flag in flags if flag.nargs is None for option in flag.option_strings}
    words: list[str] = []
    for word in arguments:
        if words and words[-1] in valued and re.match(r"-[0-9]", word):
            words[-1] += f"={word}" if words[-1].startswith("--") else word
        else:
            words.append(word)
    return words


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?`, or nothing if no known word is similar."""
    import difflib  # only a mistake needs it

    known = list(known)
    bare = {name.lstrip("-"): name for name in known if name.startswith("--") == word.startswith("--")}
    word = word.lstrip("-")
    begun = [name for name in bare if len(word) >= 2 and name.startswith(word)]
    swapped = [name for name in bare if sorted(name) == sorted(word)]
    near = begun[:1] or swapped[:1] or difflib.get_close_matches(word, bare, n=1, cutoff=0.75)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags of a command that its help shows."""
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _no_command(
    word: str, arguments: Sequence[str], commands: Mapping[str, Parser], parser: argparse.ArgumentParser
) -> str:
    flag, later = arguments[0], next((argument for argument in arguments if argument in commands), None)
    if flag.startswith("--") and later is not None:
        return f"flags come after the command: {parser.prog} {later} {flag} {word}"
    if word.partition(":")[0] in WORD_FIELDS:
        return f'unknown command "{word}"; did you mean {parser.prog} map {word}?; see {parser.prog} --help'
    listed_commands = [name for name in commands if commands[name].add_help]
    return f'unknown command "{word}"{did_you_mean(word, listed_commands)}; see {parser.prog} --help'


def _unknown(arguments: Sequence[str], unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return what is wrong with the first unknown argument. A flag such as --gpu 3 is the word gpu:3 of the tables."""
    word, see = unknown[0], f"see {parser.prog} --help"
    program, _, command = parser.prog.rpartition(" ")
    table = "" if command in WORD_COMMANDS else f"{program} map "
    name, _, value = word.partition("=")
    known = [option for flag in flags_of(parser) for option in flag.option_strings]
    field = {"-i": "gpu"}.get(name, name.removeprefix("--"))  # as of nvidia-smi
    if not word.startswith("-"):
        hint = f"; did you mean {table}{word}?" if word.partition(":")[0] in WORD_FIELDS else ""
        return f'unexpected argument "{word}"{hint}; {see}'
    if field in WORD_FIELDS and ("--url" in known or not table):
        following = [*arguments[arguments.index(word) + 1 :], "NAME"][0]
        return f"unknown flag {name}; did you mean {table}{field}:{value or following}?; {see}"
    return f"unknown flag {name}{did_you_mean(name, known)}; {see}"
