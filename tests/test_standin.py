"""The stand-in for libnvidia-ml.so.1 as the real pynvml sees it: mistakes of a test are loud."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs

from gpumap.model.readings import CARD
from tests.standin import FUNCTIONS, Driver, Gpu, MigInstance, Process, build, environment
from tests.test_nvml_health import healthy_gpu
from tests.worker import Start

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


def test_answers_from_memory_are_those_of_the_file(start: Start) -> None:
    """Whether it looks at its state in each call or now and then, as in `make bench`, gpumap reads the same."""
    gpu = healthy_gpu()
    driver = Driver(gpus=[gpu, Gpu(B, instances=[MigInstance("MIG-1", processes=[Process(7)])])])
    groups = ("codec", "health", "links", "gpm", CARD)
    workers = [start(groups=groups, STANDIN_LOOK_MILLISECONDS=pause) for pause in ("0", "20")]
    for watts in (100, 200):
        gpu.power_milliwatts = 1000 * watts
        driver.write(workers[0].state)
        time.sleep(0.12)
        read = [
            [structs.replace(one, sampled_seconds=None) for one in worker.read().gpus.values()] for worker in workers
        ]
        of_file, of_memory = (sorted(one, key=lambda reading: reading.index) for one in read)
        assert of_memory == of_file
        assert of_file[0].power_watts == watts
