"""`--web-config`: who may ask, and over what: TLS, client certificates, users and headers, as exporters are told them.

The file is that of Prometheus's exporter-toolkit (its docs/web-configuration.md); what differs: docs/web-config.md.
"""
