"""Tests of what people type in a shell: the plugin of kubectl."""
