
l
agent-made-nodekube-systemL
mainD
nvidia.com/gpu.shared+GPU-00000000-0000-0000-0000-000000000000::1
[
serverwebL
mainD
nvidia.com/gpu.shared+GPU-00000000-0000-0000-0000-000000000000::0
Q
trainermlB
main:
nvidia.com/gpu(GPU-00000000-0000-0000-0000-000000000001