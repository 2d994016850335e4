"""A live node: containerd and a kubelet of this project's own, in namespaces and cgroups that end with the test."""
