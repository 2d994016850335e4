"""`python -m gpumap`, the same as the `gpumap` command."""

import sys

from gpumap.cli import main

sys.exit(main())
