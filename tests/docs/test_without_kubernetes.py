"""docs/how-to/without-kubernetes.md: its commands, files, scrape configuration and settings are real."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import yaml

from gpumap.agent.flags import add_flags
from gpumap.agent.settings import resolve
from gpumap.cli.parser import parse
from gpumap.dispatch import command_parser
from tests.fences import read_blocks
from tests.promtool import accepted

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "without-kubernetes.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    blocks = read_blocks(PAGE, "console")
    return [shlex.split(line.removeprefix("$ ")) for block in blocks for line in block.body.splitlines()]


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    """It honors gpumap's labels, and names each machine as the rules expect."""
    (text,) = (block.body for block in read_blocks(PAGE, "yaml"))
    (file := tmp_path / "prometheus.yml").write_text(text)
    assert accepted("check", "config", file).stderr == ""
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert ("gpumap" in job["job_name"], job["honor_labels"]) == (True, True)
    assert all(one["labels"]["node"] == one["labels"]["instance"] for one in job["static_configs"])


def test_gpumaps_commands_are_understood() -> None:
    ours = [words[words.index(word) + 1 :] for words in commands() for word in words if word.endswith("bin/gpumap")]
    assert [words[0] for words in ours] == ["doctor", "top", "serve"]
    for command, *arguments in ours:
        if command == "serve":
            parser = argparse.ArgumentParser()
            add_flags(parser)
            assert not resolve(parser.parse_args(arguments), {}).has_kubelet
        else:
            assert parse(command_parser(), [command, *arguments]).no_kubelet == "true"


def test_its_files_exist() -> None:
    """Those of the commands, and the settings that it explains are those of the compose file."""
    places = {word for words in commands() for word in words if word.startswith("deploy/")}
    assert places == {"deploy/systemd/gpumap.service", "deploy/compose/machine.yaml"}
    assert all((ROOT / place).is_file() for place in places)
    (gpumap,) = yaml.safe_load((ROOT / "deploy/compose/machine.yaml").read_text())["services"].values()
    explained = dict(re.findall(r"^- `(\w+): (\w+)` \(", PAGE, re.MULTILINE))
    assert explained == {key: gpumap[key] for key in ("pid", "cgroup", "uts")}
