"""A whole cluster, as a Prometheus tells it: the series to ask for, and the documents of nodes made of them again."""
