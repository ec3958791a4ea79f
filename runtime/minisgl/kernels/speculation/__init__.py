"""Drafts of the next tokens, found in a row's own text, and their verification."""
