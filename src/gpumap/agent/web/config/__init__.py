"""`--web-config`: TLS, client certificates, users and headers, in the file that Prometheus's exporters take.

The file is that of Prometheus's exporter-toolkit (its docs/web-configuration.md); what differs: secure-the-port.md.
"""
