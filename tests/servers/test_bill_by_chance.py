"""`gpumap bill` of lives by chance: restarts of gpumap, new addresses, and gaps, against what is known of each life."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import pytest

from gpumap.agent.join.ledger import KEPT_SECONDS
from gpumap.cli.bill.counting import ENERGY, GAP, HELD
from tests.prometheus import prometheus
from tests.scraped import Samples, labels, store
from tests.servers.test_bill_prometheus import END, EVERY, FIRST, HOUR, LAST, MINUTE, START, Play, ask, life

KEPT = int(KEPT_SECONDS)
LIVES = 300


class Run(NamedTuple):
    """A counter from 0 on, and when it was scraped."""

    begun: int
    ended: int
    times: list[int]

    def at(self, time: int) -> int:
        return min(time, self.ended) - self.begun

    def counted(self, start: int, end: int) -> int:
        """What its samples after `start` and until `end` are more than the last one before; it began at 0."""
        seen = [time for time in self.times if time <= end]
        before = [time for time in seen if time <= start]
        return (self.at(seen[-1]) if seen else 0) - (self.at(before[-1]) if before else 0)


class Life(NamedTuple):
    share: Fraction
    runs: list[Run]

    def is_known(self) -> bool:
        """Whether each new beginning can be seen. One that has overtaken its old value unseen cannot."""
        seen = [run for run in self.runs if run.times]
        return all(new.at(new.times[0]) < old.at(old.times[-1]) for old, new in itertools.pairwise(seen))

    def counted(self, start: int, end: int) -> Fraction:
        return self.share * sum(run.counted(start, end) for run in self.runs)


class Chances(NamedTuple):
    url: str
    samples: Samples
    lives: dict[str, Life]


def play_lives(play: Play, seed: int) -> dict[str, Life]:
    chance = random.Random(seed)
    lives: dict[str, Life] = {}
    for number in range(LIVES):
        uuid, pod = play.card(), f"chance-{number}"
        born = chance.randrange(FIRST, END - 10 * MINUTE)
        died = min(born + chance.randrange(1, 6 * HOUR), LAST)
        cuts = sorted(
            chance.sample(range(born, died + KEPT, 4 * MINUTE), min(chance.randrange(4), (died - born) // 600))
        )
        begun, address, share = born, 0, chance.choice(["1", "0.5", "0.125"])
        runs: list[Run] = []
        for first, last in itertools.pairwise([born, *cuts, died + KEPT + EVERY]):
            happens = chance.choice(["reset", "gap", "move", "reset and move", "gap and reset"])
            if first != born:
                begun = first if "reset" in happens and first < died else begun
                address += "move" in happens
                first += chance.randrange(2 * HOUR) if "gap" in happens else 0
            offset, ended = chance.randrange(EVERY), max(died, begun)
            lives_on = life(begun, ended, share)
            counters = {name: lives_on[name] for name in (HELD.name, ENERGY.name)}
            where = f"10.0.0.{address}:9401"
            play.scrape("chance", counters, uuid=uuid, pod=pod, first=first, last=last, offset=offset, instance=where)
            if not runs or runs[-1].begun != begun:
                runs.append(Run(begun, ended, []))
            stands = range(first + offset, last, EVERY)
            runs[-1].times.extend(time for time in stands if begun < time <= ended + KEPT)
        lives[pod] = Life(Fraction(share), runs)
    return lives


@pytest.fixture(name="chances", scope="module", params=[1, 2, 6])
def run_prometheus(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Chances]:
    folder, play = tmp_path_factory.mktemp("chances"), Play()
    lives = play_lives(play, request.param)
    of = labels(uuid="GPU-0", instance="10.0.0.1:9401", job="gpumap", cluster="a")
    play.samples.scrape(GAP.name, of, range(FIRST, LAST, EVERY), lambda time: Decimal(0))
    with prometheus(folder, data=store(play.samples, folder)) as server:
        yield Chances(server.url, play.samples, lives)


@pytest.mark.parametrize(("start", "end"), [(START, END), (START + 37 * MINUTE, END - 53 * MINUTE)])
def test_it_charges_what_was_counted_whatever_happens(chances: Chances, start: int, end: int) -> None:
    """Each life to the last digit: by what is known of it, and where a new beginning cannot be seen, by the samples."""
    told = {row["pod"]: row for row in ask(chances.url, "--by", "pod", start=start, end=end)["rows"]}
    for pod, lived in chances.lives.items():
        of = {"pod": pod, "cluster": "a"}
        samples = chances.samples.increase(HELD.name, start, end, **of)
        if lived.is_known():
            assert samples == lived.counted(start, end), "else the rule that samples are reckoned by is wrong"
        joules = chances.samples.increase(ENERGY.name, start, end, **of)
        charged = told.get(pod, {"held_gpu_hours": 0, "energy_joules": 0})
        assert (charged["held_gpu_hours"], charged["energy_joules"]) == (float(samples / HOUR), float(joules)), pod
    assert sum(lived.is_known() for lived in chances.lives.values()) > LIVES * 0.8
