"""Build the images of `images/` on a machine without Docker and without a registry: `python -m image_builder`.

buildah runs the same Dockerfiles that users build. Build arguments set the differences: the base is a Debian built on
this machine, and the engine's dependencies contain torch for CPUs only.

    build           the images, their sources, and whether they are up to date
    cpu_torch       the engine's dependencies for CPUs
    buildah         runs a Dockerfile; exports an image as blobs
"""
