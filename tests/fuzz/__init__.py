"""Fuzzing: changed copies of what the sources, servers, files and clients of gpumap send, fed to every parser.

`make fuzz` looks for new crashes; `test_short` replays the crashes of `crashes/` and a fixed set of inputs. How to run
it and how to add a target: docs/dev/testing.md.
"""
