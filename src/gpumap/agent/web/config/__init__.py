"""`--web-config`: TLS, client certificates and users, in the file format of Prometheus exporters.

The format is a part of that of Prometheus's exporter-toolkit (its docs/web-configuration.md). secure-the-port.md lists
the differences.
"""
