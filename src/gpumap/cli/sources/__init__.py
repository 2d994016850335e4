"""Where nodes come from: this node, an agent, a cluster's agents through kubectl, or the series of a Prometheus."""
