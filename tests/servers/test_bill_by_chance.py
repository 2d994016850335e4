"""`gpumap bill` of lives by chance: restarts of gpumap, new addresses, and gaps, against what is known of each life.

The rule is written once more here, in Python: what PromQL makes of it must be the same.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import pytest

from gpumap.agent.join.settings import KEPT_SECONDS
from gpumap.cli.bill.promql import ENERGY, HELD
from tests.prometheus import prometheus
from tests.scraped import Samples, store
from tests.servers.test_bill_prometheus import (
    END,
    EVERY,
    EXACTLY,
    FIRST,
    HOUR,
    LAST,
    MINUTE,
    PATIENT,
    START,
    Play,
    ask,
    life,
)

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
    for address in range(4):
        play.scrape_gpu("GPU-0", instance=f"10.0.0.{address}:9401")
    with prometheus(folder, PATIENT, data=store(play.samples, folder)) as server:
        yield Chances(server.url, play.samples, lives)


class Series(NamedTuple):
    times: list[int]
    values: list[Decimal]

    def last(self, until: int, after: int = 0) -> Decimal | None:
        """The last sample's value in this time."""
        place = bisect.bisect_right(self.times, until) - 1
        return self.values[place] if place >= 0 and self.times[place] > after else None


def by_the_rule(samples: Samples, name: str, pod: str, start: int, end: int) -> Decimal:
    """What docs/explanation/accounting.md says, in steps of a minute, where each gpumap has been scraped for long."""
    found = [
        Series([time for time, _ in answer], [value for _, value in answer])
        for (series, of), answer in samples.series.items()
        if series == name and ("pod", pod) in of and answer
    ]
    amount = Decimal(0)
    for step in range(start + MINUTE, end + 1, MINUTE):
        newest = max((value for one in found if (value := one.last(step, step - MINUTE)) is not None), default=None)
        if newest is not None:
            earlier = [value for one in found if (value := one.last(step - MINUTE)) is not None]
            amount += newest - max((value for value in earlier if value <= newest), default=Decimal(0))
    return amount


@pytest.mark.parametrize(("start", "end"), [(START, END), (START + 37 * MINUTE, END - 53 * MINUTE)])
def test_it_charges_by_the_rule_whatever_happens(chances: Chances, start: int, end: int) -> None:
    """Each life as the rule says, never more than was counted, and all of it where gpumap did not begin again."""
    bill = {row["pod"]: row for row in ask(chances.url, "--by", "pod", start=start, end=end)["rows"]}
    lost = counted = Fraction(0)
    for pod, lived in chances.lives.items():
        held = chances.samples.increase(HELD.name, start, end, pod=pod, cluster="a")
        if lived.is_known():
            assert held == lived.counted(start, end), "else the rule that samples are reckoned by is wrong"
        charged = bill.get(pod, {"held_gpu_hours": 0, "energy_joules": 0})
        for counter, seen in (HELD, charged["held_gpu_hours"] * HOUR), (ENERGY, charged["energy_joules"]):
            assert seen == pytest.approx(float(by_the_rule(chances.samples, counter.name, pod, start, end))), pod
        assert charged["held_gpu_hours"] * HOUR <= float(held) * (1 + EXACTLY)
        if len(lived.runs) == 1:
            assert charged["held_gpu_hours"] * HOUR == pytest.approx(float(held), rel=EXACTLY)
        lost, counted = lost + held - Fraction(charged["held_gpu_hours"] * HOUR), counted + held
    assert lost < counted / 50, "for some 200 restarts"
    assert sum(lived.is_known() for lived in chances.lives.values()) > LIVES * 0.8
