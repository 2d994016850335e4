"""Runs a room's tests over one mutant, in a fork of a process that has imported gpumap and the tests.

The fork replaces the code of the changed functions. A change of what the import executes (a table, a default, a class)
needs a new import of gpumap and the tests. Both cost far less than a new Python for each mutant.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.util
import inspect
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import NamedTuple

import _pytest.main
import pytest
from hypothesis import HealthCheck, Phase, settings

from mutation.mutants import Mutant, compile_mutant

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
EXAMPLES = 6
ARGUMENTS = (
    *("-x", "-q", "-m", "not e2e", "--hypothesis-profile=mutation", "-p", "no:cacheprovider", "-p", "no:xdist"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning", "--rootdir", str(ROOT)),
)
IMPURE_FIXTURES = {"start", "node", "library", "libraries", "demo_url", "kubelet"}
_KEPT = "gpumap.agent._proto"
"""Its messages are registered once in a process."""
_MEMORY_BYTES = 8 << 30
_START_SECONDS = 30
_BLOCKED_SECONDS = 120
_OPTIMIZED = 1

Function = tuple[str, str, int]
"""File, qualified name and first line."""
Place = tuple[str, int, str]
"""A function of a module: its qualified name, first line, and the positions of its code."""


class Run(NamedTuple):
    """What one test did: its CPU time, and the functions of the room that it called."""

    seconds: float
    functions: frozenset[Function]


class Room:
    """Some modules, the tests that should notice their mutants, and what each test calls."""

    def __init__(
        self,
        session: pytest.Session,
        modules: Sequence[str],
        at_import: frozenset[Function],
        say: Callable[[str], None],
    ) -> None:
        self.say = say
        """Prints a line; pytest has the process's own output."""
        self._session = session
        self._at_import = at_import
        self._noticed = Counter[str]()
        self._items = {item.nodeid: item for item in session.items}
        watcher = _Watcher({str(ROOT / module) for module in modules})
        session.config.pluginmanager.register(watcher)
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "runs"

            def run() -> int:
                failed = self._loop(session.items)
                answer.write_bytes(pickle.dumps(watcher.runs))
                return failed

            if code := _in_fork(run, None):
                raise RuntimeError(f"the tests fail without a mutant ({code})")
            self._runs: dict[str, Run] = pickle.loads(answer.read_bytes())
        session.config.pluginmanager.unregister(watcher)
        self._functions: dict[str, list[FunctionType]] = {str(ROOT / module): [] for module in modules}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename in self._functions:
                self._functions[one.__code__.co_filename].append(one)
        gc.freeze()  # a fork copies no object for the sake of a collection
        say(f"{len(self._runs)} tests of {sum(run.seconds for run in self._runs.values()):.0f} s")

    def notices(self, module: str, mutant: Mutant | None) -> bool:
        """Return whether a test fails, or needs ten times its time. `None`: the module as it is, imported again."""
        path = str(ROOT / module)
        source = Path(path).read_text(encoding="utf-8")
        changed, functions = changed_functions(source, path, mutant)
        pairs = list(_pairs(compile_mutant(source, path, None), changed))
        inner = (path, pairs[-1][0].co_qualname, pairs[-1][0].co_firstlineno) if pairs else None
        called = any((path, old.co_qualname, old.co_firstlineno) in self._at_import for old, _ in pairs)
        needs_import = called or not pairs or not pairs[-1][0].co_flags & _OPTIMIZED
        # Values of an import, such as a default of a dataclass, may be used without a call of the module's functions.
        chosen = [name for name, run in self._runs.items() if needs_import or inner in run.functions]
        if not chosen:
            return False
        # Those that call the module, then the fastest first. A test that noticed others is likely to notice this one.
        callers = {name for name in chosen if any(function[0] == path for function in self._runs[name].functions)}
        chosen.sort(key=lambda name: (name not in callers, self._runs[name].seconds / (1 + self._noticed[name])))

        def run() -> int:
            if not needs_import and patch(self._functions[path], functions):
                return self._loop([self._items[name] for name in chosen])
            _forget_modules()
            sys.meta_path.insert(0, _Importer(_module_name(Path(path)), path, changed))
            files = sorted({name.partition("::")[0] for name in chosen})
            return int(pytest.main([*ARGUMENTS, *files], plugins=[_Selection(chosen)]))

        seconds = _START_SECONDS + 10 * sum(self._runs[name].seconds for name in chosen)
        with tempfile.NamedTemporaryFile("r") as failures:
            reporter = _FirstFailure(Path(failures.name))
            self._session.config.pluginmanager.register(reporter)
            code = _in_fork(run, int(seconds))
            self._session.config.pluginmanager.unregister(reporter)
            self._noticed[failures.read()] += 1
        return code != 0

    def _loop(self, items: Sequence[pytest.Item]) -> int:
        """Run tests in this process until one fails. Return how many failed."""
        self._session.items = [*items]
        with contextlib.suppress(self._session.Failed, self._session.Interrupted):
            _pytest.main.pytest_runtestloop(self._session)
        return self._session.testsfailed


def in_room(modules: Sequence[str], tests: Sequence[str], work: Callable[[Room], None]) -> None:
    """Import gpumap and the tests into this process, run the tests once, and work on their room.

    Raises RuntimeError if a test fails without a mutant.
    """
    settings.register_profile(
        "mutation",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=EXAMPLES,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    gc.unfreeze()  # of another room: the collector does not list what is frozen
    _forget_modules()
    with tempfile.TemporaryFile("w+") as output:
        ours = [os.dup(1), os.dup(2)]
        loop = _Loop(modules, work, lambda line: _write(ours[0], line))
        sys.settrace(loop.see_call)
        try:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            pytest.main([*ARGUMENTS, *tests], plugins=[loop])
        finally:
            sys.settrace(None)
            for number, saved in enumerate(ours, start=1):
                os.dup2(saved, number)
                os.close(saved)
        output.seek(0)
        if loop.error is not None:
            raise loop.error from RuntimeError(output.read()[-4000:])
        if not loop.done:
            raise RuntimeError(f"the tests cannot be collected:\n{output.read()[-4000:]}")


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())


class _Loop:
    """Works in place of pytest's loop over the tests that it collected."""

    def __init__(self, modules: Sequence[str], work: Callable[[Room], None], say: Callable[[str], None]) -> None:
        self._say = say
        self._modules = modules
        self._files = {str(ROOT / module) for module in modules}
        self._work = work
        self._called: set[Function] = set()
        self.error: BaseException | None = None
        self.done = False

    def see_call(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename in self._files and code.co_flags & _OPTIMIZED:
            self._called.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [one for one in items if _is_pure(one)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.settrace(None)
        if session.testsfailed:
            return True
        try:
            self._work(Room(session, self._modules, frozenset(self._called), self._say))
            self.done = True
        except BaseException as error:
            self.error = error
        return True


# --- the code of a mutant ---


def changed_functions(source: str, path: str, mutant: Mutant | None) -> tuple[CodeType, dict[Place, CodeType]]:
    """Return the code of a mutant, and the new code of each function that has the change or contains it."""
    changed = compile_mutant(source, path, mutant.ordinal if mutant else None)
    pairs = _pairs(compile_mutant(source, path, None), changed)
    return changed, {_place(old): new for old, new in pairs if old.co_flags & _OPTIMIZED}


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield each code object that has the change, in itself or in a function inside it."""
    children = list(zip(_children(old), _children(new), strict=False))
    inside = [pair for one in children for pair in _pairs(*one)]
    if inside or _is_changed_itself(old, new):
        yield old, new
        yield from inside


def _children(code: CodeType) -> list[CodeType]:
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _is_changed_itself(old: CodeType, new: CodeType) -> bool:
    def own(code: CodeType) -> tuple[object, ...]:
        constants = [None if isinstance(one, CodeType) else (type(one), repr(one)) for one in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, constants

    return own(old) != own(new)


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno, str(list(code.co_positions()))


def patch(there: Sequence[FunctionType], functions: Mapping[Place, CodeType]) -> bool:
    """Give the functions of a module their changed code. Return whether that was possible."""
    found = [(one, new) for one in there if (new := functions.get(_place(one.__code__))) is not None]
    if any(new.co_freevars != one.__code__.co_freevars for one, new in found):
        return False
    for one, new in found:
        one.__code__ = new
    return bool(found)


def _forget_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("gpumap", "tests", "scripts") and not name.startswith(_KEPT):
            del sys.modules[name]


def _module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with changed code."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            self._path,
            loader=self,
            submodule_search_locations=[str(Path(self._path).parent)] if self._path.endswith("__init__.py") else None,
        )

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))


# --- pytest ---


class _Watcher:
    """Notices which functions of some files each test calls, its fixtures included."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self._called: set[Function] = set()
        self.runs: dict[str, Run] = {}

    def _trace(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_filename in self._files:
            self._called.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._called.clear()
        began = time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.runs[item.nodeid] = Run(time.process_time() - began, frozenset(self._called))


def _is_pure(item: pytest.Item) -> bool:
    """Return whether a test starts no process and opens no socket. Other processes do not have the mutant."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    used = {*getattr(item, "fixturenames", ())} - parameters.keys()
    return not used & IMPURE_FIXTURES and not inspect.iscoroutinefunction(getattr(item, "obj", None))


class _FirstFailure:
    """Writes the name of the test that fails first."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._path.stat().st_size:
            self._path.write_text(report.nodeid)


class _Selection:
    """Runs only some tests, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ranks = {name: rank for rank, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((one for one in items if one.nodeid in self._ranks), key=lambda one: self._ranks[one.nodeid])


def _in_fork(run: Callable[[], int], cpu_seconds: int | None) -> int:
    """Call a function in a fork with limits of CPU time and memory. Return its exit code; negative after a signal."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.setpgid(0, 0)
            if cpu_seconds is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
                signal.alarm(_BLOCKED_SECONDS + 10 * cpu_seconds)
                resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            code = run()
        finally:
            os._exit(code)
    try:
        status = os.waitpid(pid, 0)[1]
    finally:
        _end_group(pid)
    return os.waitstatus_to_exitcode(status)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, 9)
    except ProcessLookupError:
        pass
