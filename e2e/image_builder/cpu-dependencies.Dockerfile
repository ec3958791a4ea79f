# The engine's dependencies for CPUs, as `image_builder.cpu_torch` puts them together.
ARG BASE
FROM ${BASE}
COPY site /opt/minisgl/site
# Without it every start would compile thousands of modules anew: the root file system is read-only when it runs.
# Some packages carry a few files for other Pythons, which do not compile.
RUN python3 -m compileall -q -j 2 --invalidation-mode unchecked-hash /opt/minisgl/site || true
