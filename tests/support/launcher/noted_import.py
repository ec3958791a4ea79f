"""Module for standbys to preload: its import writes the niceness of its thread to the file that the variable names."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

FILE: Final = "NOTED_IMPORT"

Path(os.environ[FILE]).write_text(str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
