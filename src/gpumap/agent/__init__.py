"""What runs on a GPU node: it asks the kubelet, NVML, /proc and local files, joins the answers and serves the result.

In come the flags of `serve`; out go pages over HTTP. Data flows one way: `sources` → `join.step` and its last stage,
`judgement` → snapshot → families (`metrics`, `dialects`) → `exposition` → `web`. `collect` is the loop, `service` puts
the parts together.

Start with `collect`, then `sources/kubelet`, then `join/step`.
"""
