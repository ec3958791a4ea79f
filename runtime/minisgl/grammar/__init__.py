"""Grammars of constrained answers, behind llguidance: built, validated, compiled, and matched token by token."""
