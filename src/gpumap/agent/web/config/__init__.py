"""`--web-config`: TLS, client certificates, users and headers, in the file format of Prometheus exporters.

The format is that of Prometheus's exporter-toolkit (its docs/web-configuration.md). secure-the-port.md lists the
differences.
"""
