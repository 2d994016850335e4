"""Tests of what people type in a shell: completion, and the plugin of kubectl."""
