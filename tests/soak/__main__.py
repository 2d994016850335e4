"""`python -m tests.soak [--minutes 60] [--seed N]`: run the soak, print its figures; exit with 1 at a broken law."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom

from tests import standin
from tests.demo_process import GPUMAP, environment
from tests.machine import short_directory
from tests.soak import clients, cost
from tests.soak.clock import SPEED
from tests.soak.node import AGENTS, SoakNode
from tests.soak.plan import Plan
from tests.soak.watch import BrokenLawError, Watched, agents
from tests.tools import tool

BROKEN = Path("build/soak")
"""The page, the map, the truth and a capture of the moment of a broken law."""


@dataclass
class Soak:
    """One run, and what it found."""

    seed: int
    minutes: float
    leak_bytes: int = 0
    broken: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Play the plan for the time given. What breaks is in `broken`."""
        with short_directory() as directory:
            node = SoakNode(directory, standin.build(standin.LIBRARIES), Random(self.seed))
            self.agents = agents(node, self.leak_bytes)
            self.plan = Plan(node, self.agents, node.random)
            try:
                async with node.kubelet:
                    for agent in self.agents:
                        await agent.start()
                    await self._play()
                    for agent in self.agents:
                        await agent.end(signal.SIGTERM)
                self.broken += self._after_the_end()
            except BrokenLawError as error:
                self.broken.append(f"{self.plan.now}: {error}")
                await self._capture(node, error)
            finally:
                for agent in self.agents:
                    await agent.close()

    async def _play(self) -> None:
        node = self.plan.node
        tasks = [asyncio.create_task(self.plan.play()), asyncio.create_task(node.notice_pauses())]
        for agent in self.agents:
            tasks += [asyncio.create_task(agent.watch()), asyncio.create_task(clients.ask(agent, self.asked))]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self.minutes * 60, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for agent in self.agents:
            if agent.process is not None and agent.process.returncode is not None:
                await agent.start()  # the plan was between its end and its start

    def _after_the_end(self) -> Iterator[str]:
        for agent in self.agents:
            if "Traceback" in (log := agent.log.read_text()):
                yield f"{agent.name} logged a traceback:\n{log[log.index('Traceback') :][:2000]}"
        yield from (f"steady: {what}" for what in cost.growth(self.agents[0].usage))

    async def _capture(self, node: SoakNode, error: BrokenLawError) -> None:
        """Write down what was served, what was true, and what gpumap reads now: the node does not change any more."""
        folder = BROKEN / str(self.seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "page.prom").write_text(error.page)
        (folder / "map.json").write_text(error.document)
        (folder / "truth.txt").write_text("\n\n".join(map(repr, list(node.history)[-20:])))
        for agent in self.agents:
            shutil.copy(agent.log, folder)
        command = [str(GPUMAP), "record", str(folder / "capture"), *node.flags_for(node.proc)]
        variables = standin.environment(node.library, node.state(AGENTS[0]))
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment(**variables), capture_output=True, text=True, timeout=120
        )
        self.broken.append(f"page, map, truth and capture: {folder} {done.stderr if done.returncode else ''}")

    def is_too_busy(self) -> bool:
        """Whether most pages were not judged in full, so that the run shows little."""
        return 2 * sum(agent.excused for agent in self.agents) > sum(agent.pages for agent in self.agents)

    def write_usage(self) -> Path:
        """Write down what the steady agent cost in the course of the run."""
        BROKEN.mkdir(parents=True, exist_ok=True)
        file = BROKEN / f"usage-{self.seed}.csv"
        lines = ["at,collections,service_kib,worker_kib,service_descriptors,service_threads"]
        for one in self.agents[0].usage:
            memory = [one.memory_kib.get(part, "") for part in ("service", "worker")]
            own = [one.descriptors.get("service", ""), one.threads.get("service", "")]
            lines.append(",".join(map(str, (f"{one.at:.0f}", f"{one.collections:g}", *memory, *own))))
        file.write_text("\n".join([*lines, ""]))
        return file

    # --- the table ---

    def table(self) -> str:
        """The figures of the run."""
        steady, other = self.agents
        rows: list[tuple[str, object]] = [
            ("seed", self.seed),
            ("hours of the node", f"{self.minutes * SPEED / 60:.1f}"),
            ("pages judged", steady.pages + other.pages),
            ("of them while the machine paused", steady.excused + other.excused),
            ("maps judged", steady.maps + other.maps),
            ("values of counters judged", steady.counters.checked + other.counters.checked),
            ("collections", f"{steady.collections:g} + {other.collections:g}"),
            ("rounds", self.plan.rounds),
            *self.plan.node.counts.items(),
            ("restarts of gpumap", other.lives - 1),
            ("owners seen", _counted(steady.seen + other.seen)),
            ("clients", _counted(self.asked)),
        ]
        for kind, count in sorted(self.plan.faults.items()):
            rows.append((kind, f"{count} times, slowest recovery {self.plan.slowest.get(kind, 0):g} collections"))
        for part in ("service", "worker"):
            rows += self._cost(part)
        rows += [("children, temporary files", _range(steady, "children") + "; " + _range(steady, "files"))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _cost(self, part: str) -> Iterator[tuple[str, object]]:
        usage = [one for one in cost.warm(self.agents[0].usage) if part in one.memory_kib]
        if not usage:
            return
        found = cost.memory_slope(self.agents[0].usage, part)
        rate = "too few samples" if found is None else f"{found:+.3f} KiB per collection"
        yield (
            f"memory of the {part}",
            f"{usage[0].memory_kib[part]} KiB, at the end {usage[-1].memory_kib[part]} KiB; {rate}",
        )
        for what in ("descriptors", "threads"):
            counts = [getattr(one, what)[part] for one in usage if part in getattr(one, what)]
            yield f"{what} of the {part}", f"{counts[0]}, at the end {counts[-1]} ({min(counts)}–{max(counts)})"


def _range(agent: Watched, what: str) -> str:
    counts = [getattr(one, what) for one in cost.warm(agent.usage)] or [0]
    return f"{counts[0]}, at the end {counts[-1]}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="How long it lasts. (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="Repeat the plan of this seed. (default: a new one)")
    parser.add_argument("--leak", type=int, default=0, metavar="BYTES", help="Let gpumap leak: the soak must fail.")
    given = parser.parse_args(arguments)
    tool("promtool")  # without it there is no soak, rather than half of one
    seed = SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    print(f"soak: seed {seed}, {given.minutes:g} minutes at {SPEED:g} times speed", flush=True)
    soak, begun = Soak(seed, given.minutes, given.leak), time.monotonic()
    asyncio.run(soak.run())
    print(soak.table())
    print(f"the course of memory: {soak.write_usage()}")
    for what in soak.broken:
        print(f"BROKEN after {time.monotonic() - begun:.0f} s: {what}", file=sys.stderr)
    if soak.broken:
        return 1
    if too_busy := soak.is_too_busy():
        print("INCONCLUSIVE: the machine paused during most pages. Repeat the run on an idle machine.", file=sys.stderr)
    return 2 if too_busy else 0


if __name__ == "__main__":
    sys.exit(main())
