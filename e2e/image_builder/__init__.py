"""Builds the images of `images/` on a machine without Docker and without a registry: `python -m image_builder`.

The Dockerfiles are the ones that users build, run by buildah. What differs is given as build arguments: the base is a
Debian made here, and the engine's dependencies are a torch that computes on the CPU alone.

    build           which images there are, and when one is up to date
    cpu_torch       the engine's dependencies, small
    buildah         runs a Dockerfile; exports an image as blobs
"""
