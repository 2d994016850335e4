"""Speaks the NVML worker's words from a capture's nvml.json: `python -m tests.replay_driver FILE`."""

import json
import sys
from pathlib import Path

from gpumap.nvml_worker import wire


def main(path: Path) -> None:
    """Answer every request with what the file says."""
    for line in sys.stdin.buffer:
        asked = wire.decode_request(line)
        said = json.loads(path.read_text())
        if "error" in said:
            answers = [wire.encode_error(wire.ErrorSaid(asked.read, **said["error"]))]
        else:
            driver, cuda, nvml = said["driver_version"], said["cuda_version"], said["nvml_version"]
            answers = [wire.encode_driver(wire.DriverSaid(asked.read, driver, cuda, nvml, len(said["gpus"])))]
            answers += [wire.encode_gpu(asked.read, wire.gpu_from_object(gpu)) for gpu in said["gpus"]]
        sys.stdout.buffer.write(b"".join(answers))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
