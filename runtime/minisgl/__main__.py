"""`python -m minisgl` is `minisgl`."""

import sys

from minisgl.cli.main import main

sys.exit(main())
