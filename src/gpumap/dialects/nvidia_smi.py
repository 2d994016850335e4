"""The dialect nvidia-smi."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
NEEDS: tuple[str, ...] = ()
