"""A server with the protocol of the Hugging Face Hub, which can be configured to fail."""

from fake_hub.server import FakeHub, Repository

__all__ = ["FakeHub", "Repository"]
