"""The pages for browsers, the chat at `/` and the reference of the API at `/docs`, and the files that they load."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_DIRECTORY: Final = Path(__file__).parents[1] / "static"
_MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

PAGE_FILES: Final = {
    f"/static/{file.relative_to(_DIRECTORY).as_posix()}": file
    for file in sorted(_DIRECTORY.rglob("*.*"))
    if file.suffix in (".css", ".js")
}
"""Style sheets and scripts by path. They are listed once: no other file of the machine can be requested."""

WEB_PAGES: Final = {"/": _DIRECTORY / "chat.html", "/docs": _DIRECTORY / "docs.html", **PAGE_FILES}
"""Everything that browsers load, by path."""


async def web_page(request: Request) -> Response:
    """Return the file of a path in `WEB_PAGES`. A browser keeps it, and asks each time whether it has changed."""
    file = WEB_PAGES[request.scope["path"]]
    body = file.read_bytes()
    tag = f'"{sha256(body).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_MEDIA_TYPES[file.suffix])
