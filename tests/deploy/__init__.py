"""Tests of what is shipped: the chart, the manifests, the image and the wheel. They need helm, kubectl and buildah."""
