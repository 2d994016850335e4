"""One file per source: each asks one thing and returns values of `gpumap.model`."""

import os

# When Python cannot start a process by vfork, it forks. gRPC's handlers of fork then end gRPC's threads, and abort this
# process if they cannot start them again. No fork of gpumap uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
