"""What NVML is asked for: the groups that were chosen, and for a dialect, while it is on, what it needs."""

import argparse
import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent import service
from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import Exposition
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.metrics import GROUPS
from gpumap.agent.nvml_worker.health import CARD_FIELDS
from gpumap.agent.nvml_worker.reading import field_numbers
from gpumap.agent.settings import Settings, collect_everything, resolve
from gpumap.lab.capture import replay
from gpumap.lab.capture.record import record
from gpumap.lab.demo.scenario import parse_scenario
from gpumap.lab.node import PlayedNode
from gpumap.model.readings import CARD
from gpumap.model.snapshot import Snapshot
from tests.demo_node import demo_node
from tests.standin import Driver
from tests.test_nvml_health import CALLS_OF_CODEC, CALLS_OF_THE_CARD, count_calls, healthy_gpu
from tests.worker import Start

OF_THE_CARD = {"nvidia-smi", "dcgm", "dcgm49"}
STEADY = """
gpus:
  - {model: H100, memory: 80GiB}
  - {model: H100, memory: 80GiB, mig: [1g.10gb, 3g.40gb]}
  - {model: A100, memory: 80GiB, replicas: 2}
  - {model: NVIDIA GeForce RTX 2080, memory: 8GiB}
pods:
  - {name: whole, containers: [{name: c, gpus: [0], processes: [{memory: 1GiB, sm: 50%}]}]}
  - {name: shared, containers: [{name: c, slots: {gpu: 2}, processes: [{memory: 1GiB, sm: 20%}]}]}
  - {name: idle, containers: [{name: c, gpus: [3]}]}
"""


def settled(*dialects: str, collect: tuple[str, ...] = DEFAULT_GROUPS) -> Settings:
    return replace(resolve(argparse.Namespace(), {}), groups=collect, dialects=dialects)


def asked(settings: Settings) -> tuple[str, ...]:
    return service.asked_groups(settings.groups, settings.dialects)


# --- the groups -------------------------------------------------------------------------------------------------------


def test_by_default_nvml_reads_only_the_default_groups() -> None:
    assert asked(resolve(argparse.Namespace(), {})) == DEFAULT_GROUPS


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_that_is_on_is_given_what_it_needs(name: str) -> None:
    """Whatever --collect says; and it needs nothing that cannot be asked for."""
    dialect = DIALECTS[name]
    assert set(dialect.needs) <= {*GROUPS, CARD}
    assert set(asked(settled(name, collect=("use",)))) == {"use", *dialect.needs}
    assert (CARD in dialect.needs) is (name in OF_THE_CARD)


def test_a_capture_has_all_groups() -> None:
    """It can be played with any group and any dialect."""
    everything = collect_everything(settled(collect=("use",)))
    assert asked(everything) == (*GROUPS, CARD)


# --- the calls --------------------------------------------------------------------------------------------------------


def calls(start: Start, path: Path, groups: tuple[str, ...]) -> Counter[str]:
    """Those of three readings of one GPU that reports all values. The wait for events goes by time, not by readings."""
    worker = start(groups=groups, STANDIN_CALLS=str(path))
    driver = Driver(gpus=[healthy_gpu()])
    for _ in range(3):
        worker.read(driver)
    counted = count_calls(worker, driver, path)
    del counted["nvmlEventSetWait_v2"]
    return counted


@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - OF_THE_CARD))
def test_a_dialect_without_needs_costs_no_call(start: Start, tmp_path: Path, name: str) -> None:
    """The driver is asked just what it is asked for the native groups."""
    groups = asked(settled(name))
    assert groups == asked(settled())
    assert not calls(start, tmp_path / "calls", groups).keys() & (CALLS_OF_THE_CARD.keys() | CALLS_OF_CODEC)
    assert not set(field_numbers(groups)) & {field.number for field in CARD_FIELDS}


@pytest.mark.parametrize("name", sorted(OF_THE_CARD))
def test_calls_of_a_dialect_are_made_while_it_is_on(start: Start, tmp_path: Path, name: str) -> None:
    """Its calls are added, and none of the others comes more often: two calls and six fields every 30 s, eight once."""
    before, groups = asked(settled()), asked(settled(name))
    more = calls(start, tmp_path / "with", groups)
    more.subtract(calls(start, tmp_path / "without", before))
    assert {call: times for call, times in more.items() if times} == CALLS_OF_THE_CARD | dict.fromkeys(
        CALLS_OF_CODEC, 3
    )
    added = set(field_numbers(groups)) - set(field_numbers(before))
    assert added == {field.number for field in CARD_FIELDS}
    assert (len(CARD_FIELDS), sum(times == 3 for times in CALLS_OF_THE_CARD.values())) == (6, 2)
    assert sum(times for times in CALLS_OF_THE_CARD.values() if times != 3) == 8


# --- the values -------------------------------------------------------------------------------------------------------


def series(snapshot: Snapshot, dialect: str) -> set[str]:
    """A dialect's lines without their values, and its families' heads."""
    text = Exposition(DIALECTS[dialect].families).render(snapshot).decode()
    return {line if line.startswith("#") else line.rpartition(" ")[0] for line in text.splitlines()}


async def collected(node: PlayedNode, settings: Settings) -> Snapshot:
    found: list[Snapshot] = []
    settings = replace(node.settings(settings), push=False)
    async with service.collector(settings, node.driver_command, found.append) as loop:
        for _ in range(2):
            await loop.collect()
    return found[-1]


async def test_each_dialect_has_its_values_whatever_is_collected(directory: Path) -> None:
    """Over a demo's node: with only its needs each has the series that it has when NVML is asked for everything."""
    async with demo_node(parse_scenario(STEADY), directory) as node:
        everything = await collected(node, collect_everything(settled()))
        for name in DIALECTS:
            reduced = await collected(node, settled(name, collect=("allocation",)))
            whole = series(everything, name)
            assert len(whole) > 1
            assert whole ^ series(reduced, name) == set(), name
        bare = await collected(node, settled(collect=("allocation",)))
    for name in OF_THE_CARD:
        assert series(everything, name) - series(bare, name)


async def test_what_dialects_show_is_recorded_and_played(directory: Path) -> None:
    """Whatever was collected on the node that was recorded: a capture can be played with each dialect."""
    async with demo_node(parse_scenario(STEADY), directory) as node:
        everything = await collected(node, collect_everything(settled()))
        settings = node.settings(settled(collect=("allocation",)))
        recorded = await record(settings, node.driver_command, None, asyncio.Event())
    assert recorded is not None
    played = (await replay.snapshots(recorded[0]))[-1]
    for name in OF_THE_CARD:
        assert series(played, name) == series(everything, name)
