"""The stand-in for libnvidia-ml.so.1 as the real pynvml sees it: mistakes of a test are loud."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin import FUNCTIONS, Driver, Gpu, build, environment

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


def test_rules_must_name_what_exists(tmp_path: Path) -> None:
    """A misspelt function or target, or a line break in a value, is an error of the test that writes it."""
    with pytest.raises(ValueError, match="nvmlDeviceGetNam"):
        Driver(fail={("nvmlDeviceGetNam", 0): 3}).write(tmp_path / "state")
    with pytest.raises(ValueError, match="target"):
        Driver(crash={("nvmlDeviceGetName", "gpu0")}).write(tmp_path / "state")
    with pytest.raises(ValueError, match="line break"):
        Driver(gpus=[Gpu("GPU-1\ncount 9")]).write(tmp_path / "state")
    with pytest.raises(ValueError, match="nvmlNothing"):
        build(tmp_path, without=["nvmlNothing"])
    assert list(tmp_path.iterdir()) == []


def test_every_function_is_exported_and_can_be_left_out(libraries: Path) -> None:
    """The whole library exports each function that the source names, the empty variant none of them."""
    probe = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); print([f for f in sys.argv[2:] if hasattr(lib, f)])"
    for without in ((), tuple(FUNCTIONS)):
        command = [sys.executable, "-c", probe, str(build(libraries, without)), *sorted(FUNCTIONS)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert found.strip() == str(sorted(FUNCTIONS - set(without)))


def test_mistakes_in_a_state_are_loud(libraries: Path, tmp_path: Path) -> None:
    """A state that makes no sense ends the process with a word why, instead of looking like a driver's answer."""
    state = tmp_path / "state"
    state.write_text(f"count 1\ngpu.0.uuid {A}\ngpu.0.power many\n")
    call = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetPowerUsage(n.nvmlDeviceGetHandleByIndex(0))"
    variables = {**os.environ, **environment(build(libraries), state)}
    done = subprocess.run([sys.executable, "-c", call], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-6, "NVML stand-in: 'many' is not a number\n")
