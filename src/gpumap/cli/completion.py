"""Shell completion scripts for bash, zsh and fish. They come from the parser, so they offer only what exists."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gpumap.cli.command_line import Parser, flags_of, positionals_of, subcommands
from gpumap.cli.this_node import FLAG_CHOICES

_DIRECTORIES, _FILES = ("DIR",), ("PATH", "FILE")


class _Word(NamedTuple):
    """A flag, or a word without one (`names` is empty). `takes`: "", "file", "directory", "value" or "choice"."""

    names: Sequence[str]
    takes: str
    choices: Sequence[str]
    summary: str


def script(parser: Parser, shell: str) -> str:
    """Return the completion script for a shell."""
    return _SCRIPTS[shell]({name: (summary, list(_words(one))) for name, (summary, one) in subcommands(parser).items()})


_Commands = dict[str, tuple[str, list[_Word]]]


def _words(parser: argparse.ArgumentParser) -> Iterator[_Word]:
    for action in (*flags_of(parser), *positionals_of(parser)):
        named = (FLAG_CHOICES[one] for one in action.option_strings if one in FLAG_CHOICES)
        choices = tuple(action.choices or next(named, ()))
        takes = "choice" if choices else "value"
        if action.metavar in _DIRECTORIES:
            takes = "directory"
        elif action.metavar in _FILES:
            takes = "file"
        elif action.option_strings and action.nargs == 0:
            takes = ""
        summary = re.split(r"\. |; | \((?:default|\$)", (action.help or "").replace("%%", "%"))[0].rstrip(".")
        yield _Word(action.option_strings, takes, choices, summary)


# --- bash -------------------------------------------------------------------------------------------------------------

_BASH = """\
# bash completion of gpumap: source <(gpumap completion bash)
_gpumap() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="" word
  # "=" is a word of its own to readline.
  if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    if [[ $word != -* ]]; then command=$word; break; fi
  done
  COMPREPLY=()
  case "$command $prev" in
{values}
  esac
  case "$command" in
    "") COMPREPLY=($(compgen -W "{commands} --help --version" -- "$cur")) ;;
{flags}
  esac
}}
complete -F _gpumap gpumap
"""


def _bash(commands: _Commands) -> str:
    takers: dict[str, list[str]] = {}  # by their completion: many flags share one
    flags = []
    for name, (_, words) in commands.items():
        for word in words:
            if word.names and word.takes:
                takers.setdefault(_bash_values(word), []).extend(f'"{name} {one}"' for one in word.names)
        known = " ".join(one for word in words for one in word.names if one.startswith("--"))
        bare = [word for word in words if not word.names]
        before = "".join(f"if [[ $cur != -* ]]; then {_bash_values(word)}; return; fi; " for word in bare)
        flags.append(f'    {name}) {before}COMPREPLY=($(compgen -W "{known}" -- "$cur")) ;;')
    values = [f"    {'|'.join(names)})\n      {complete}; return ;;" for complete, names in takers.items()]
    return _BASH.format(values="\n".join(values), commands=" ".join(commands), flags="\n".join(flags))


def _bash_values(word: _Word) -> str:
    match word.takes:
        case "choice":
            return f'COMPREPLY=($(compgen -W "{" ".join(word.choices)}" -- "$cur"))'
        case "file" | "directory" as kind:
            option = "-d" if kind == "directory" else "-f"
            return f'compopt -o filenames 2>/dev/null || :; mapfile -t COMPREPLY < <(compgen {option} -- "$cur")'
    return ":"


# --- zsh --------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef gpumap
# zsh completion of gpumap: source <(gpumap completion zsh), after compinit
_gpumap() {{
  local -a commands
  commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe -t commands command commands
    _arguments '--help[show help]' '--version[show the version]'
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{flags}
  esac
}}
if [[ $funcstack[1] == _gpumap ]]; then _gpumap "$@"; else compdef _gpumap gpumap; fi
"""


def _zsh(commands: _Commands) -> str:
    listed = "\n".join(f"    {_zsh_quoted(f'{name}:{summary}')}" for name, (summary, _) in commands.items())
    cases = []
    for name, (_, words) in commands.items():
        arguments = " \\\n      ".join(one for word in words for one in _zsh_arguments(word))
        cases.append(f"    {name})\n      _arguments \\\n      {arguments} ;;")
    return _ZSH.format(commands=listed, flags="\n".join(cases))


def _zsh_arguments(word: _Word) -> Iterator[str]:
    action = {"choice": f"({' '.join(word.choices)})", "file": "_files", "directory": "_files -/", "value": " "}
    value = f":value:{action[word.takes]}" if word.takes else ""
    if not word.names:
        yield _zsh_quoted(f"1{value}")
    for name in word.names:
        summary = word.summary.translate(str.maketrans("[]", "()"))
        yield _zsh_quoted(f"{name}{'=' if value and name.startswith('--') else ''}[{summary}]{value}")


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -------------------------------------------------------------------------------------------------------------


def _fish(commands: _Commands) -> str:
    lines = ["# fish completion of gpumap: gpumap completion fish > ~/.config/fish/completions/gpumap.fish"]
    lines += ["complete -c gpumap -f"]
    for name, (summary, _) in commands.items():
        lines.append(f"complete -c gpumap -n __fish_use_subcommand -a {name} -d {_fish_quoted(summary)}")
    for name, (_, words) in commands.items():
        for word in words:
            kind = {"choice": "x", "value": "x", "file": "rF", "directory": "x"}.get(word.takes, "")
            values = "(__fish_complete_directories)" if word.takes == "directory" else " ".join(word.choices)
            parts = [f"complete -c gpumap -n '__fish_seen_subcommand_from {name}'"]
            parts += [f"-{'l' if one.startswith('--') else 's'} {one.lstrip('-')}" for one in word.names]
            parts += [f"-{kind}"] if kind and word.names else []
            parts += [f"-a {_fish_quoted(values)}"] if values else []
            parts += [f"-d {_fish_quoted(word.summary)}"] if word.summary else []
            lines.append(" ".join(parts))
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: dict[str, Callable[[_Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
SHELLS = tuple(_SCRIPTS)
