"""Images and other media in the results of tools: models that read only text get a note in their place.

Agents have no part in what a tool returns, and send it again with every later turn: an error would end their session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NOUNS: Final[Mapping[str, str]] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
"""By type of a part, in all APIs."""
MEDIA: Final = tuple(_NOUNS)


def media_note(kind: str) -> str | None:
    """Return the text in place of a part of this type; None if the type is no medium. The header of unknown fields
    names what is left out."""
    noun = _NOUNS.get(kind)
    return noun and f"[{noun} left out: this model reads only text]"
