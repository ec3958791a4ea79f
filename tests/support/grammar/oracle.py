"""Validation of answers by `jsonschema`, with numbers as they are written."""

from __future__ import annotations

import decimal
import json
from decimal import Decimal
from typing import Any

import jsonschema


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except decimal.InvalidOperation:
        return float(text)  # an exponent of more digits than decimals have


def problems(schema_text: str, answer: str) -> list[str]:
    """Errors of an answer under a schema, formats included; an answer that is no JSON has one."""
    try:
        value = json.loads(answer, parse_float=_number)
    except ValueError as error:
        return [f"{error}: {answer}"]
    schema: Any = json.loads(schema_text, parse_float=Decimal)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    with decimal.localcontext(prec=2000):
        errors = kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value)
        return [f"{error.message} under {error.schema}" for error in errors]
