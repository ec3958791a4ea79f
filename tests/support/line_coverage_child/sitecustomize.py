"""Python imports this module at its start, in processes whose parent wants to know which lines they reach."""

from support.line_coverage import start_in_child

start_in_child()
