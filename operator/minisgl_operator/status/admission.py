"""Refusals of pods by the API server: what refused them, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

# What refused the pod, and what to change, by the form of the server's message.
_AUTHORS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[str, str]]], ...]] = (
    (
        re.compile(r"violates PodSecurity \"([^\"]+)\""),
        lambda found: (
            f'Pod Security of the namespace ("{found[1]}")',
            "Remove what the message names from spec.engine, or from the webhook or policy that adds it to pods; or "
            "change the label pod-security.kubernetes.io/enforce of the namespace.",
        ),
    ),
    (
        re.compile(r"ValidatingAdmissionPolicy '([^']+)'(?: with binding '([^']+)')?"),
        lambda found: (
            f'ValidatingAdmissionPolicy "{found[1]}"',
            "Change the spec as the policy demands, or the policy"
            + (f' or its binding "{found[2]}".' if found[2] else "."),
        ),
    ),
    (
        re.compile(r"admission webhook \"([^\"]+)\" denied"),
        lambda found: (
            f'The admission webhook "{found[1]}"',
            "Change the spec as its message demands, or the policy behind the webhook.",
        ),
    ),
    (
        re.compile(r"failed quota: ([^:]+): must specify"),
        lambda found: (
            f'ResourceQuota "{found[1]}"',
            "Set these fields in spec.engine.resources, or create a LimitRange with defaults in the namespace.",
        ),
    ),
    (
        re.compile(r"(?:maximum|minimum) \S+ usage per|limit to request ratio per|less than or equal to \S+ limit"),
        lambda _: (
            "A LimitRange of the namespace",
            "Change spec.engine.resources, or the LimitRange.",
        ),
    ),
    (
        re.compile(r"no PriorityClass with name"),
        lambda _: ("Priority admission", "Create the PriorityClass, or change spec.engine.priorityClassName."),
    ),
    (
        re.compile(r"RuntimeClass"),
        lambda _: ("RuntimeClass admission", "Create the RuntimeClass, or change spec.engine.runtimeClassName."),
    ),
)


def refusal(message: str) -> tuple[str, str]:
    """What refused the pod, and what to change. `message` is the API server's."""
    for pattern, describe in _AUTHORS:
        if (found := pattern.search(message)) is not None:
            return describe(found)
    return "The API server", "Change the spec, or the policy of the cluster or of the namespace."
