"""The door: `gpumap` and `python -m gpumap` begin here. Imports next to nothing by itself."""

# ruff: noqa: E402
from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself takes long to import

_signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

import sys
from collections.abc import Callable, Sequence

from gpumap.cli.main import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `gpumap`. Return its exit code: 0, 1 (failed at run time) or 2 (a flag or file is invalid)."""

    def prepare() -> Callable[[], int]:
        from gpumap.dispatch import prepared

        return prepared(sys.argv[1:] if arguments is None else arguments)

    return guarded(prepare)


if __name__ == "__main__":
    sys.exit(main())
