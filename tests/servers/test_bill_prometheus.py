"""`gpumap bill` asks a real Prometheus with known samples: it charges what they say, within its stated error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gpumap.agent.join.settings import KEPT_SECONDS
from gpumap.cli.args import server_of
from gpumap.cli.bill.promql import (
    ENERGY,
    HELD,
    MEMORY,
    NOT_MEASURED,
    PRESENT,
    SNAPSHOT,
    UNATTRIBUTED,
    USED,
    WORK_MEMORY,
    WORK_SM,
)
from gpumap.cli.bill.table import bill_values
from gpumap.cli.commands.bill import make_bill, read_request
from gpumap.cli.parser import parse
from gpumap.dispatch import command_parser
from tests.command import one_line, run_command
from tests.prometheus import prometheus
from tests.scraped import Samples, Value, labels, store

MINUTE, HOUR = 60, 3600
PATIENT = "--query.timeout=1d"
START = int(datetime(2024, 3, 4, 20, tzinfo=UTC).timestamp())
END = START + 8 * HOUR  # over midnight, where Prometheus's blocks end
EVERY = 30
FIRST, LAST = START - 3 * HOUR, END + HOUR
RATES = {
    HELD.name: Decimal(1),
    USED.name: Decimal("0.437"),
    ENERGY.name: Decimal("311.7"),
    MEMORY.name: Decimal(3 << 30),
}


def life(born: int, died: int = LAST, share: str = "1") -> dict[str, Value]:
    """The counters of a container: they run while it lives, and stand for five minutes more."""

    def running(rate: Decimal) -> Value:
        return lambda time: rate * (min(time, died) - born) if born < time <= died + KEPT_SECONDS else None

    return {name: running(rate * Decimal(share)) for name, rate in RATES.items()}


class Play:
    """What happened, as samples."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.cards = 0

    def card(self) -> str:
        self.cards += 1
        return f"GPU-{self.cards:08}"

    def scrape(
        self,
        namespace: str,
        counters: dict[str, Value],
        *,
        uuid: str,
        pod: str = "",
        first: int = FIRST,
        last: int = LAST,
        offset: int = 7,
        instance: str = "10.0.0.1:9401",
        job: str = "gpumap",
        cluster: str = "a",
        late: int = 0,
    ) -> None:
        """Scrape the counters of the namespace's pod from `first` to `last`, by a clock that is so late."""
        named = labels(namespace=namespace, pod=pod or f"{namespace}-0", container="main", uuid=uuid)
        of = tuple(sorted((*named, *labels(instance=instance, job=job, cluster=cluster))))
        for name, value in counters.items():
            self.samples.scrape(name, of, range(first + offset, last, EVERY), value, late)

    def scrape_gpu(self, uuid: str, *, first: int = FIRST, last: int = LAST, **target: str) -> None:
        """Scrape what gpumap exposes of each GPU: by it the bill knows that the server scraped that gpumap."""
        of = labels(uuid=uuid, **({"instance": "10.0.0.1:9401", "job": "gpumap", "cluster": "a"} | target))
        self.samples.scrape(NOT_MEASURED.name, of, range(first + 7, last, EVERY), lambda time: Decimal(0))


def without(counters: dict[str, Value], *names: str) -> dict[str, Value]:
    return {name: value for name, value in counters.items() if name not in names}


def whole_lives(play: Play) -> None:
    """Pods that begin and end in, before and after the window."""
    play.scrape("steady", life(FIRST), uuid=play.card())
    play.scrape("inside", life(START + 100 * MINUTE + 11, START + 171 * MINUTE + 3), uuid=play.card())
    play.scrape("brief", life(START + 77 * MINUTE + 5, START + 77 * MINUTE + 21), uuid=play.card())
    play.scrape("leaves", life(FIRST + 17, START + 33 * MINUTE + 1), uuid=play.card())
    play.scrape("arrives", life(END - 33 * MINUTE - 1), uuid=play.card())
    play.scrape("quarter", life(FIRST + 3, share="0.25"), uuid=play.card())
    play.scrape("departed", life(FIRST, START - 2 * MINUTE), uuid=play.card())
    play.scrape("early", life(FIRST, START - HOUR), uuid=play.card())


def restarts(play: Play) -> None:
    """gpumap begins again, with its counters or without, under its old address or another; two scrapers see it."""
    uuid, again = play.card(), START + 2 * HOUR + 17
    play.scrape("reset", life(FIRST), uuid=uuid, last=again)
    for number, (begun, ended) in enumerate([(again, again + 3 * HOUR + 41), (again + 3 * HOUR + 41, LAST)]):
        play.scrape("reset", life(begun + number), uuid=uuid, first=begun, last=ended, offset=20)
    uuid = play.card()
    play.scrape("moved", life(FIRST), uuid=uuid, last=START + HOUR)
    play.scrape("moved", life(FIRST), uuid=uuid, first=START + HOUR + 13, instance="10.0.0.9:9401")
    uuid = play.card()
    play.scrape("moved-anew", life(FIRST), uuid=uuid, last=START + HOUR)
    play.scrape("moved-anew", life(START + HOUR), uuid=uuid, first=START + HOUR, offset=19, instance="10.0.0.9:9401")
    uuid, again = play.card(), START + 3 * HOUR + 10
    for job, offset in (("gpumap-one", 2), ("gpumap-other", 17)):
        play.scrape("twice", life(FIRST), uuid=uuid, last=again, offset=offset, job=job)
        play.scrape("twice", life(again), uuid=uuid, first=again, offset=offset, job=job)
    again = START + HOUR + 30 * MINUTE  # born at the end of one hour, it began again later than it was old at that end
    uuid = play.card()
    play.scrape("young", life(START + HOUR - 40), uuid=uuid, last=again)
    play.scrape("young", life(again), uuid=uuid, first=again + 50, instance="10.0.0.9:9401")
    uuid, again = play.card(), START + HOUR + 12 * MINUTE  # it began again and ended in one hour of the clock
    play.scrape("ends-anew", life(FIRST), uuid=uuid, last=START + HOUR + 10 * MINUTE)
    play.scrape("ends-anew", life(again, again + 20 * MINUTE), uuid=uuid, first=again, instance="10.0.0.9:9401")
    uuid, name = play.card(), "again"
    play.scrape(name, life(START + HOUR, START + 2 * HOUR), uuid=uuid)
    play.scrape(name, life(START + 4 * HOUR, START + 4 * HOUR + 50 * MINUTE), uuid=uuid)


OVERLAPS, SKEWS = (0, 20, 50, 90, 200), (10, 30, 45, 60)


def side_by_side(play: Play) -> None:
    """An agent and its successor serve at the same time for a while; or two scrapers with different clocks see gpumap
    begin again."""
    for number in range(0, 60, 15):
        again = START + 2 * HOUR + number
        for overlap in OVERLAPS:
            uuid, name = play.card(), f"overlap-{overlap}-{number}"
            play.scrape(name, life(FIRST), uuid=uuid, last=again + overlap)
            play.scrape(name, life(again), uuid=uuid, first=again + 1, offset=11, instance="10.0.0.9:9401")
        for skew in SKEWS:
            uuid, name = play.card(), f"skew-{skew}-{number}"
            for job, late in (("gpumap-one", 0), ("gpumap-other", skew)):
                play.scrape(name, life(FIRST), uuid=uuid, last=again, offset=2, job=job, late=late)
                play.scrape(name, life(again), uuid=uuid, first=again + 1, offset=17, job=job, late=late)


def gaps(play: Play) -> None:
    """Scrapes are missing: in the middle, around the window's ends, when a pod comes, and before it all."""
    for name, gone, back in (
        ("gap", START + 2 * HOUR, START + 2 * HOUR + 40 * MINUTE),
        ("gap-before", START - 20 * MINUTE, START + 10 * MINUTE),
        ("gap-after", END - 10 * MINUTE, END + 20 * MINUTE),
        ("gap-around", START - 20 * MINUTE, END + 20 * MINUTE),
    ):
        uuid = play.card()
        play.scrape(name, life(FIRST), uuid=uuid, last=gone)
        play.scrape(name, life(FIRST), uuid=uuid, first=back)
    uuid, first, where = play.card(), START + 3 * HOUR, "10.0.0.8:9401"
    play.scrape("unseen", life(FIRST - 10 * HOUR), uuid=uuid, first=first, instance=where)
    play.scrape_gpu(uuid, first=first, instance=where)
    play.scrape("slice", life(START - 36 * MINUTE, share="0.143"), uuid=uuid, first=START, cluster="c")
    play.scrape_gpu(uuid, first=START, cluster="c")
    uuid, gone, back = play.card(), START + 5 * HOUR, START + 5 * HOUR + 30 * MINUTE
    for first, last in ((FIRST, gone), (back, LAST)):
        play.scrape_gpu(uuid, first=first, last=last)
    for name, begun in (("overtaken", START + 2 * HOUR + 5 * MINUTE), ("overtaken-soon", START + 110 * MINUTE)):
        other = play.card()  # away for an hour of the clock, it began again, and overtook its old value in the next
        play.scrape(name, life(START), uuid=other, last=START + 40 * MINUTE)
        play.scrape(name, life(begun), uuid=other, first=begun)
    play.scrape("born-unseen", life(gone + 5 * MINUTE), uuid=uuid, first=back)


def incomplete(play: Play) -> None:
    """Containers of which not all is known, and what no container is charged for."""
    play.scrape("mig", without(life(FIRST), USED.name, ENERGY.name), uuid="MIG-00000001")
    play.scrape("squatter", without(life(FIRST), HELD.name), uuid=play.card())
    of = labels(uuid=play.card(), instance="10.0.0.1:9401", job="gpumap", cluster="a")
    times = range(FIRST + 7, LAST, EVERY)
    play.samples.scrape(
        NOT_MEASURED.name, of, times, lambda time: Decimal("0.25") * min(max(time - START, 0), 2 * HOUR)
    )
    play.samples.scrape(UNATTRIBUTED.name, of, times, lambda time: Decimal("61.3") * (time - FIRST))


def other_cluster(play: Play) -> None:
    """A second cluster. Its scraper did not honour gpumap's labels."""
    play.scrape_gpu(play.card(), namespace="monitoring", pod="gpumap-x7", container="gpumap", instance="", cluster="b")
    for name, pod in (("inside", "inside-0"), ("north", "north-0")):
        target = labels(namespace="monitoring", pod="gpumap-x7", container="gpumap", job="gpumap", cluster="b")
        born, died = (FIRST, LAST) if name == "north" else (START + HOUR + 4, START + 2 * HOUR + 4)
        given = labels(exported_namespace=name, exported_pod=pod, exported_container="main", uuid=play.card())
        of = tuple(sorted((*target, *given)))
        for counter, value in life(born, died).items():
            play.samples.scrape(counter, of, range(FIRST + 7, LAST, EVERY), value)


def too_fast(play: Play) -> None:
    """Counters that run at four times real time: one of a container, and those of four containers together."""
    play.scrape("fast", life(FIRST, share="4"), uuid=play.card(), job="fast")
    uuid = play.card()
    for number in range(4):
        play.scrape(f"whole-{number}", life(FIRST), uuid=uuid, job="whole")


def jobs(play: Play) -> None:
    """Two nodes with a Slurm job each. The server does not scrape the second one for a while: before the window, in it
    and at its end. In the second time it scrapes neither."""
    outages = {
        "one": [(START + 4 * HOUR, START + 4 * HOUR + 20 * MINUTE)],
        "two": [
            (START - 15 * MINUTE, START + 15 * MINUTE),
            (START + 2 * HOUR, START + 2 * HOUR + 39 * MINUTE),
            (START + 4 * HOUR, START + 4 * HOUR + 20 * MINUTE),
            (END - 30 * MINUTE, END + 30 * MINUTE),
        ],
    }
    for number, (node, gone) in enumerate(outages.items()):
        times = [time for time in range(FIRST, LAST, EVERY) if not any(start < time <= end for start, end in gone)]
        target = {"instance": f"{node}:9401", "job": "jobs"}
        play.samples.scrape(SNAPSHOT, labels(**target), times, Decimal)
        work = labels(workload_kind="slurm_job", workload=str(number), uuid=f"GPU-{node}", **target)
        for gauge in (PRESENT, WORK_SM, WORK_MEMORY):
            play.samples.scrape(gauge.name, work, times, lambda time: Decimal(1))


def forged(play: Play) -> None:
    """A pod of a tenant, which Prometheus scrapes as it scrapes everybody's, exposes counters and labels of others."""
    others = labels(
        exported_namespace="steady", exported_pod="steady-0", exported_container="main", uuid="GPU-00000001"
    )
    for cluster in ("a", "b"):
        target = labels(
            job="kubernetes-pods", namespace="tenant", pod="liar-0", instance="10.9.9.9:80", cluster=cluster
        )
        times = range(FIRST + 7, LAST, EVERY)
        for of, share in ((others, "7"), (labels(uuid="GPU-00000001"), "3")):
            for counter, value in life(FIRST, share=share).items():
                play.samples.scrape(counter, tuple(sorted((*target, *of))), times, value)
        play.samples.scrape("gpumap_build_info", target, times, lambda time: Decimal(1))
        team = labels(**dict(others), label_example_com_team_name="red")
        play.samples.scrape("kube_pod_labels", tuple(sorted((*target, *team))), times, lambda time: Decimal(1))


TEAMS = {"steady": "blue", "inside": "blue", "reset": "red", "gap": "red", "twice": "red"}


def teams(play: Play) -> None:
    """kube-state-metrics reports a team of some pods; one is moved to another team, one is in both clusters."""
    times = range(FIRST + 3, LAST, EVERY)

    def labelled(name: str, team: str | None, first: int = FIRST, last: int = LAST, cluster: str = "a") -> None:
        of = labels(namespace=name, pod=f"{name}-0", uid="x", job="kube-state-metrics", cluster=cluster)
        if cluster == "b":
            of = labels(job="kube-state-metrics", namespace="kube", pod="ksm-0", cluster="b")
            of = tuple(sorted((*of, ("exported_namespace", name), ("exported_pod", f"{name}-0"))))
        of = of if team is None else tuple(sorted((*of, ("label_example_com_team_name", team))))
        play.samples.scrape("kube_pod_labels", of, times, lambda time: Decimal(1) if first <= time < last else None)

    for name, team in TEAMS.items():
        labelled(name, team)
    labelled("moved", "red", last=START + 6 * HOUR)
    labelled("moved", "green", first=START + 6 * HOUR)
    labelled("arrives", "red", last=END - 100)
    labelled("arrives", "green", first=END - 100)
    labelled("leaves", "green", last=START)
    labelled("leaves", None, first=START)
    labelled("quarter", None)
    labelled("inside", "white", cluster="b")
    labelled("steady", None, cluster="b")

    def owns(metric: str, first: int = FIRST, last: int = LAST, **of: str) -> None:
        owner = labels(**of, owner_is_controller="true", job="kube-state-metrics", cluster="a")
        play.samples.scrape(metric, owner, times, lambda time: Decimal(1) if first <= time < last else None)

    for name in ("steady", "moved", "arrives"):
        owns("kube_pod_owner", namespace=name, pod=f"{name}-0", owner_kind="ReplicaSet", owner_name="web-1")
        owns("kube_replicaset_owner", namespace=name, replicaset="web-1", owner_kind="Deployment", owner_name="web")
    owns("kube_pod_owner", namespace="gap", pod="gap-0", owner_kind="Job", owner_name="j-1", last=START + HOUR)
    owns("kube_job_owner", namespace="gap", job_name="j-1", owner_kind="CronJob", owner_name="j", last=START + HOUR)
    owns("kube_pod_owner", namespace="leaves", pod="leaves-0", owner_kind="", owner_name="")


@dataclass(frozen=True)
class Known:
    """A server, and the samples in it."""

    url: str
    samples: Samples
    data: Path

    def increase(self, counter: str, name: str) -> Fraction:
        """What all samples of a namespace in cluster a say that a counter went in the window."""
        return self.samples.increase(counter, START, END, namespace=name, cluster="a")


@pytest.fixture(name="known", scope="module")
def run_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    folder = tmp_path_factory.mktemp("prometheus")
    play = Play()
    for happen in (whole_lives, restarts, side_by_side, gaps, incomplete, other_cluster, too_fast, jobs, forged, teams):
        happen(play)
    data = store(play.samples, folder)
    with prometheus(folder, PATIENT, data=data) as server:
        yield Known(server.url, play.samples, data)


def ask(url: str, *arguments: str, start: int = START, end: int = END, match: str = 'cluster="a"') -> Any:
    """The bill as JSON, without the server's address. However slow the machine is: nothing here has a deadline."""
    where = ("--prometheus", url, "--from", str(start), "--to", str(end), "--match", match, "--timeout", "1d")
    given = parse(command_parser(), ["bill", *where, *arguments])
    found = bill_values(asyncio.run(make_bill(server_of(given), *read_request(given))))
    return {name: value for name, value in found.items() if name != "server"}


def rows(found: Any) -> dict[str, dict[str, Any]]:
    return {row["namespace"]: row for row in found["rows"]}


EXACT = (
    *("steady", "inside", "brief", "leaves", "arrives", "quarter"),
    *("moved", "again", "gap", "gap-before", "gap-after", "overtaken", "overtaken-soon", "born-unseen"),
)
RESTARTED = {"reset": 2, "moved-anew": 1, "young": 1, "ends-anew": 1}
"""How often counters begin again at 0."""
EXACTLY = 1e-12
"""A server adds up floating-point numbers."""
COLUMNS = {
    HELD: ("held_gpu_hours", HOUR),
    USED: ("used_gpu_hours", HOUR),
    ENERGY: ("energy_joules", 1),
    MEMORY: ("memory_gib_hours", HOUR << 30),
}


@pytest.fixture(name="bill", scope="module", params=["1m", "4m", "10m"])
def ask_bill(known: Known, request: pytest.FixtureRequest) -> Any:
    """Cluster a's bill, in longer and shorter steps."""
    return ask(known.url, "--resolution", request.param)


@pytest.mark.parametrize("name", EXACT)
def test_the_bill_is_that_of_all_samples(known: Known, bill: Any, name: str) -> None:
    """Pods that come, go and stay, moves and gaps: it is what all samples together say."""
    row = rows(bill)[name]
    for counter, (column, unit) in COLUMNS.items():
        assert row[column] == pytest.approx(float(known.increase(counter.name, name) / unit), rel=EXACTLY), column


@pytest.mark.parametrize("name", RESTARTED)
def test_a_restart_loses_a_step_at_most(known: Known, bill: Any, name: str) -> None:
    """What a counter had counted since the step before it began again at 0; never is anything charged twice."""
    row = rows(bill)[name]
    for counter, (column, unit) in COLUMNS.items():
        most = float(known.increase(counter.name, name) / unit)
        lost = float(RATES[counter.name]) * bill["resolution_seconds"] * RESTARTED[name] / unit
        assert most - lost <= row[column] <= most * (1 + EXACTLY), column


def test_two_scrapers_of_one_gpumap_are_one(bill: Any) -> None:
    """Their samples are of different moments, also where gpumap begins again between: nothing is counted twice."""
    until_it_ended, since = 3 * HOUR + 2 + 13, 17 + 599 * EVERY
    held = rows(bill)["twice"]["held_gpu_hours"] * HOUR
    assert until_it_ended + since - bill["resolution_seconds"] <= held <= until_it_ended + since


def test_time_before_the_first_scrape_is_not_charged(bill: Any) -> None:
    """A counter of hours that is first seen in the window: from then on it is charged, and the hours are reported."""
    held, not_charged = rows(bill)["unseen"]["held_gpu_hours"] * HOUR, bill["not_charged_gpu_hours"] * HOUR
    assert held + not_charged == pytest.approx(21 * HOUR - 23, rel=EXACTLY), "its value at the end"
    assert 5 * HOUR - bill["resolution_seconds"] - EVERY < held < 5 * HOUR


def test_a_slice_that_is_first_seen_is_not_charged_its_life(known: Known) -> None:
    """A seventh of a GPU, held for 36 minutes when the server began to scrape: two minutes cost two minutes at most."""
    found = ask(known.url, match='cluster="c"', end=START + 2 * MINUTE)
    held, not_charged = found["totals"]["held_gpu_hours"] * HOUR, found["not_charged_gpu_hours"] * HOUR
    assert 0 < held <= 2 * MINUTE * 0.143
    assert held + not_charged == pytest.approx((36 * MINUTE + 97) * 0.143, rel=EXACTLY), "its value at the end"


def test_pods_that_were_gone_before_are_not_on_the_bill(bill: Any) -> None:
    """Nor is one with counters that still exist when the window begins, nor one that no scrape saw from end to end."""
    assert not {"departed", "early", "gap-around"} & set(rows(bill))


def test_what_is_not_known_is_absent(bill: Any) -> None:
    """MIG reports no use: it is in no idle share. A container without an assignment uses, and holds nothing."""
    mig, squatter = rows(bill)["mig"], rows(bill)["squatter"]
    assert (mig["used_gpu_hours"], mig["idle_ratio"], mig["energy_joules"]) == (None, None, None)
    assert mig["held_gpu_hours"] == mig["held_use_unknown_gpu_hours"] == 8
    assert (squatter["held_gpu_hours"], squatter["idle_ratio"]) == (None, None)
    assert bill["totals"]["held_use_unknown_gpu_hours"] == 8
    assert bill["used_without_share_gpu_hours"] == squatter["used_gpu_hours"]


def test_unattributed_amounts_are_below_the_table(bill: Any) -> None:
    """The energy that is no container's, and the time that could not be measured."""
    assert bill["unattributed"]["energy_joules"] == pytest.approx(8 * HOUR * 61.3, rel=EXACTLY)
    assert bill["gap_gpu_hours"] == 0.5


@pytest.mark.parametrize("middle", [START + 4 * HOUR, START + 2 * HOUR + 20 * MINUTE, START + HOUR])
def test_bills_of_two_halves_are_the_bill_of_the_whole(known: Known, middle: int) -> None:
    """Wherever it is cut, also in the midst of a gap: each second is charged once."""
    whole, one, other = (
        rows(ask(known.url, start=start, end=end)) for start, end in ((START, END), (START, middle), (middle, END))
    )
    assert set(whole) == set(one) | set(other)
    for name, row in whole.items():
        for column in ("held_gpu_hours", "used_gpu_hours", "energy_joules", "memory_gib_hours"):
            parts = [half[name][column] or 0 for half in (one, other) if name in half]
            assert sum(parts) == pytest.approx(row[column] or 0, rel=EXACTLY), (name, column)


def assert_alike(one: Any, other: Any) -> None:
    """But for the order in which floating-point numbers were added up."""
    assert len(one["rows"]) == len(other["rows"])
    for row, another in zip([*one["rows"], one["totals"]], [*other["rows"], other["totals"]], strict=True):
        for column, value in another.items():
            assert row[column] == (pytest.approx(value, rel=EXACTLY) if isinstance(value, float) else value), column


@pytest.mark.parametrize("samples", [6000, 30_000])
def test_a_server_with_a_sample_limit_gives_the_same_bill(known: Known, tmp_path: Path, samples: int) -> None:
    """Where a day is too many samples for it, parts of the day are asked for, and add up to the same digits."""
    with prometheus(tmp_path, PATIENT, f"--query.max-samples={samples}", data=known.data) as server:
        assert_alike(ask(server.url), ask(known.url))


def test_a_server_that_does_too_little_fails_in_one_line(known: Known, tmp_path: Path) -> None:
    """It says what the server said, and prints no part of a bill."""
    with prometheus(tmp_path, "--query.max-samples=10", data=known.data) as server:
        done = run_command("bill", "--prometheus", server.url, "--from", str(START), "--to", str(END))
        assert one_line(done, 1).startswith(
            f"{server.url} answered 422 Unprocessable Entity: query processing would load too"
        )


def test_labels_that_the_scraper_renamed_are_found(known: Known) -> None:
    """Scraped without honorLabels, pods are `exported_pod`: they are charged, and not gpumap's own pod."""
    found = rows(ask(known.url, match='cluster="b"'))
    assert {name: row["held_gpu_hours"] for name, row in found.items()} == {"inside": 1, "north": 8}


def test_several_clusters_add_up(known: Known) -> None:
    """Without --match each pod of each cluster is on the bill; both namespaces of one name are one line."""
    found = rows(ask(known.url, match=""))
    assert found["inside"]["held_gpu_hours"] == 4252 / HOUR + 1
    assert found["north"]["held_gpu_hours"] == 8


# --- by label ---------------------------------------------------------------------------------------------------------

BY_TEAM = ("--by", "label", "--label", "example.com/teamName")


def test_by_label(known: Known) -> None:
    """A line for each team; pods without one are not dropped, so that the total is that of the namespaces."""
    found, by_namespace = ask(known.url, *BY_TEAM), ask(known.url)
    held = {row["label_value"]: row["held_gpu_hours"] for row in found["rows"]}
    of = {name: row["held_gpu_hours"] or 0 for name, row in rows(by_namespace).items()}
    assert set(held) == {"blue", "green", "red", None}
    assert held["blue"] == pytest.approx(of["steady"] + of["inside"], rel=EXACTLY)
    latest = of["moved"] + of["arrives"] + of["leaves"]
    assert held["green"] == pytest.approx(latest, rel=EXACTLY), "the last value that a pod had counts"
    assert held["red"] == pytest.approx(of["reset"] + of["gap"] + of["twice"], rel=EXACTLY)
    assert found["totals"] == by_namespace["totals"]


def failure(known: Known, *arguments: str) -> str:
    done = run_command("bill", "--prometheus", known.url, "--from", str(START), "--to", str(END), *arguments)
    return one_line(done, 1).removeprefix(f"{known.url} ")


def test_a_pod_of_two_teams_at_once(known: Known) -> None:
    """Pods of one name in two clusters cannot be distinguished by kube_pod_labels: --match chooses a cluster."""
    expected = failure(known, *BY_TEAM, "--match", 'namespace=~"inside|moved"', "--label-match", "")
    assert expected.startswith(
        "has two values of label example.com/teamName for pod inside/inside-0 at the same time (blue, white). "
    )
    assert "--match 'cluster=" in expected


def test_by_workload(known: Known) -> None:
    """A line for each Deployment and CronJob. A pod without an owner, or that is not listed, has its own."""
    found, by_namespace = ask(known.url, "--by", "workload"), ask(known.url)
    held = {(row["namespace"], row["workload"]): row["held_gpu_hours"] for row in found["rows"]}
    of = {name: row["held_gpu_hours"] for name, row in rows(by_namespace).items()}
    for name, workload in (
        ("steady", "Deployment/web"),
        ("moved", "Deployment/web"),
        ("gap", "CronJob/j"),
        ("leaves", "Pod/leaves-0"),
        ("inside", "Pod/inside-0"),
    ):
        assert held[name, workload] == pytest.approx(of[name], rel=EXACTLY)
    assert found["totals"] == by_namespace["totals"]
    (message,) = (one for one in found["warnings"] if "kube-state-metrics does not list" in one)
    assert "steady" not in message


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["fast", "whole"])
def test_more_than_a_gpu_in_a_window_is_no_bill(known: Known, job: str) -> None:
    """32 GPU-hours of one GPU in 8 hours, also if no counter is too fast."""
    expected = failure(known, "--match", f'job="{job}"')
    assert expected.startswith("reports that containers held 32.0 GPU-hours of GPU-")
    assert "which is longer than the window" in expected


# --- what is missing --------------------------------------------------------------------------------------------------


def test_time_that_the_server_does_not_hold(known: Known) -> None:
    """It is said from when to when nothing was seen; also in a table's foot, and beside a CSV."""
    start = FIRST - 50 * HOUR
    before, after = ask(known.url, start=start, end=LAST + 3 * HOUR + 11 * MINUTE)["warnings"]
    assert before == (
        "The server has no gpumap samples from 2024-03-02T15:00:00Z to 2024-03-04T17:00:00Z. "
        "Use within this gap may not be charged."
    )
    assert after.startswith("The server has no gpumap samples from 2024-03-05T05:00:00Z to 2024-03-05T08:11:00Z. ")
    where = ("--prometheus", known.url, "--from", str(start), "--to", str(END), "--match", 'cluster="a"')
    assert before in run_command("bill", *where).stdout
    done = run_command("bill", *where, "-o", "csv")
    assert (done.returncode, done.stderr) == (0, f"gpumap: {before}\n")
    assert "Nothing" not in done.stdout


RESUMED = (
    "The server did not scrape these pods just before 2024-03-04T20:00:00Z: gap-before/gap-before-0. Their rows may "
    "contain use from before this time, since its last scrape."
)


def test_a_window_that_begins_in_an_outage(known: Known) -> None:
    """The counters went on: the first increase contains the time before the window, and the bill names the pods."""
    found = ask(known.url, end=START + HOUR)
    assert found["warnings"] == [RESUMED]
    assert rows(found)["gap-before"]["held_gpu_hours"] > 1.3


def test_outages_of_one_node(known: Known) -> None:
    """Work outside pods has no counters. Each outage of one node has a line, also one over an end of the window."""
    found = ask(known.url, "--by", "job", match='job="jobs"')
    message = [
        f"The server has no gpumap samples{of} from 2024-03-0{ends}. Use within this gap is not charged."
        for of, ends in (
            ("", "5T00:00:00Z to 2024-03-05T00:20:00Z"),
            (" of two:9401", "4T20:00:00Z to 2024-03-04T20:15:00Z"),
            (" of two:9401", "4T22:00:00Z to 2024-03-04T22:39:00Z"),
            (" of two:9401", "5T03:30:00Z to 2024-03-05T04:00:00Z"),
        )
    ]
    assert found["warnings"] == message
    present = {row["job"]: row["present_gpu_hours"] * HOUR for row in found["rows"]}
    assert present == {"0": 8 * HOUR - 20 * MINUTE, "1": 8 * HOUR - (15 + 39 + 20 + 30) * MINUTE}
