
l
agent-made-nodekube-systemL
mainD
nvidia.com/gpu.shared+GPU-00000000-0000-0000-0000-000000000000::1