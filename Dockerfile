# gpumap's image: Python, the run-time lock, gpumap, and nothing else (docs/how-to/build-the-image.md).
# Build and push: docker build -t REGISTRY/gpumap:0.1.0 . && docker push REGISTRY/gpumap:0.1.0, or `make image`.

# Both bases are pinned by the digest of their index, which names an image for each platform. They must have the same
# Python, 3.13. Newer digests: docker buildx imagetools inspect IMAGE:TAG (docs/how-to/build-the-image.md, "Renew the bases").
ARG BUILD=docker.io/library/python:3.13-slim-trixie@sha256:8d9d0b8bcf6506481eae4907c18f5e3e7902e629f5f6d684f9e7c32e85e3ddf0
ARG RUNTIME=gcr.io/distroless/python3-debian13:latest@sha256:931a490beb37db6a1d137ad11ed47ae4c0d4741ca5c2285818b49e9a8ee11c56

FROM ${RUNTIME} AS runtime

FROM ${BUILD} AS build
ARG SOURCE_DATE_EPOCH=0
# A hash of its own for each run would give sets in byte code another order in each build.
ENV PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements.lock requirements-image.lock ./
# An index other than PyPI, with or without a password, comes as a secret, of which no layer keeps anything:
# docker build --secret id=pip.conf,src=pip.conf …
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv --without-pip /build/tools \
 && python3 -m pip --python /build/tools/bin/python install --only-binary :all: --require-hashes -r requirements-image.lock \
 && python3 -m venv --without-pip /build/gpumap \
 && python3 -m pip --python /build/gpumap/bin/python install --no-compile --only-binary :all: --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE source/
COPY src source/src
RUN (cd source && ../tools/bin/python -c 'from setuptools.build_meta import build_wheel; build_wheel("/build")') \
 && python3 -m pip --python gpumap/bin/python install --no-compile --no-deps --no-index --find-links /build gpumap
# What the final stage adds to its base, under /image. Debian's Python looks for packages in dist-packages.
COPY --from=runtime / /build/runtime
RUN packages=/usr/local/lib/python3.13/dist-packages \
 && mkdir -p /image/usr/local/bin /image/usr/local/share/sbom /image/usr/lib /image/etc "/image${packages%/*}" \
 # Python and its packages list what they have, and under which licence.
 && sed -i "s/^dynamic = .*/version = \"$(echo gpumap-*.whl | cut -d- -f2)\"/" source/pyproject.toml \
 && tools/bin/cyclonedx-py environment --pyproject source/pyproject.toml --mc-type application --output-reproducible \
      --spec-version 1.6 --output-file /image/usr/local/share/sbom/gpumap.cdx.json gpumap/bin/python \
 && mv gpumap/lib/python3.13/site-packages "/image$packages" \
 && { echo '#!/usr/bin/python3'; sed 1d gpumap/bin/gpumap; } >/image/usr/local/bin/gpumap \
 && chmod 755 /image/usr/local/bin/gpumap \
 # Byte code, also of Python's own library, which the base has as text alone. It is never compared with the text: the
 # image is read-only, and times are not kept.
 && python3 -m compileall -q --invalidation-mode unchecked-hash -s /image "/image$packages" \
 && python3 -m compileall -q --invalidation-mode unchecked-hash -s /build/runtime /build/runtime/usr/lib/python3.13 \
 && (cd runtime/usr/lib && find python3.13 -name '*.pyc' | LC_ALL=C sort | tar -cf - -T -) | tar -xf - -C /image/usr/lib \
 # NVIDIA's runtime and CDI tell the loader where they put the driver's library: by the host's ldconfig, which reads the
 # one file and writes the other. Toolkits before 1.18 do so only where the image has a cache.
 && echo 'include /etc/ld.so.conf.d/*.conf' >runtime/etc/ld.so.conf \
 && ldconfig -r /build/runtime && cp runtime/etc/ld.so.conf runtime/etc/ld.so.cache /image/etc/ \
 && find /image -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM ${RUNTIME}
COPY --from=build /image /
# PATH: where gpumap is. Nothing can be written, so nothing is tried. /usr/local/nvidia/lib64 is where GKE's nodes have
# the driver's library. What NVIDIA's runtime reads: show every GPU, and bring NVML, not CUDA.
ENV PATH=/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONNOUSERSITE=1 \
    PYTHONSAFEPATH=1 \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility
# The kubelet's directory pod-resources is 0750 root: user 0 opens it without any capability, and nobody else does.
USER 0:0
WORKDIR /
EXPOSE 9401
ENTRYPOINT ["gpumap"]
CMD ["serve"]
# No HEALTHCHECK: Kubernetes ignores it, and the chart probes /healthz and /readyz.
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title=gpumap \
      org.opencontainers.image.description="Which container holds which GPU, and what it really uses" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION \
      org.opencontainers.image.source=$SOURCE \
      org.opencontainers.image.created=$CREATED
