"""The warning before connections are refused for want of descriptors."""

from __future__ import annotations

import resource

import pytest

from minisgl.frontend.server.connection import OpenFiles


def test_a_limit_that_is_nearly_used_up_is_logged_once_until_files_are_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    files = OpenFiles()
    for descriptor in (5, 899):
        files.watch(descriptor)
    assert not caplog.records
    for descriptor in (900, 901, 880, 950):
        files.watch(descriptor)
    (record,) = caplog.records
    assert "901 of at most 1000 files are open" in record.getMessage()
    for descriptor in (700, 990):
        files.watch(descriptor)
    assert len(caplog.records) == 2
