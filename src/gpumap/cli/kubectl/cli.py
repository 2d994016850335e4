"""Where `kubectl-gpumap` begins, which kubectl runs as `kubectl gpumap`. Imports next to nothing by itself."""

# ruff: noqa: E402
from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself takes long to import

_signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

import sys
from collections.abc import Callable, Sequence

from gpumap.cli.main import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, as `gpumap.__main__` does."""

    def prepare() -> Callable[[], int]:
        from gpumap.cli.kubectl.program import prepared

        return prepared(sys.argv[1:] if arguments is None else arguments)

    return guarded(prepare)


if __name__ == "__main__":
    sys.exit(main())
