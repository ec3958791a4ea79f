# Kernels for Hopper GPUs, compiled ahead of time, on top of the engine's dependencies. An engine with them compiles
# nothing when it starts. The build needs no GPU and takes 20 minutes on two cores. From the repository's root:
#
#   docker build -f images/engine/Dockerfile --target dependencies -t minisgl-dependencies .
#   docker build -f images/engine/kernels.Dockerfile --build-arg DEPENDENCIES=minisgl-dependencies -t minisgl-kernels .
#   docker build -f images/engine/Dockerfile --build-arg DEPENDENCIES=minisgl-kernels -t minisgl-engine .
#
# MODELS are directories in the image or built-in configurations (`minisgl kernels build --help`); empty: all built-in
# ones. Compiled kernels of minisgl are used only with the same version of their source code.
ARG DEPENDENCIES

FROM ${DEPENDENCIES} AS compiler
ARG APT_ARCHIVE=snapshot
COPY images/engine/apt-install /tmp/apt-install
RUN /tmp/apt-install ${APT_ARCHIVE} g++ ninja-build && \
    rm -rf /var/lib/apt/lists/* /tmp/apt-install
COPY images/engine/compiler.lock /tmp/compiler.lock
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes --target /opt/cuda \
        -r /tmp/compiler.lock
COPY runtime/minisgl /opt/minisgl/own/minisgl
ARG MODELS=""
RUN PYTHONPATH=/opt/minisgl/own:/opt/minisgl/site CUDA_HOME=/opt/cuda/nvidia/cu13 \
    python3 -m minisgl kernels build ${MODELS} --out /opt/minisgl/kernels

FROM ${DEPENDENCIES}
COPY --from=compiler /opt/minisgl/kernels /opt/minisgl/kernels
ENV MINISGL_KERNELS_DIR=/opt/minisgl/kernels
