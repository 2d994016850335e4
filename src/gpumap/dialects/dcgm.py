"""The dialect dcgm."""

from gpumap.families import Family

FAMILIES: tuple[Family, ...] = ()
NEEDS: tuple[str, ...] = ()
