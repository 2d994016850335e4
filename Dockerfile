# gpumap's image: Python, the run-time lock, gpumap. Build: docker build -t REGISTRY/gpumap:0.1.0 .
# It runs as uid 0, without capabilities: the kubelet's socket opens to nobody else.
ARG BASE=docker.io/library/python:3.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY requirements.lock requirements-dev.lock pyproject.toml README.md LICENSE ./
COPY src src
# Only the build needs setuptools; it is taken from the other lock, hashes and all, and removed again.
RUN python -m venv /opt/gpumap \
 && sed -n '/^setuptools==/,/[^\\]$/p' requirements-dev.lock >setuptools.lock \
 && /opt/gpumap/bin/pip install --no-cache-dir --require-hashes -r requirements.lock -r setuptools.lock \
 && /opt/gpumap/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/gpumap/bin/pip uninstall --yes setuptools

FROM ${BASE}
COPY --from=build /opt/gpumap /opt/gpumap
ENV PATH=/opt/gpumap/bin:$PATH
EXPOSE 9401
ENTRYPOINT ["gpumap"]
CMD ["serve"]
