"""A server that speaks the Hugging Face Hub's protocol, and misbehaves as told."""

from fake_hub.server import FakeHub, Repository

__all__ = ["FakeHub", "Repository"]
