"""What is wrong with a profile's content, in one line of the file's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vegas_runtime.errors import ProfileInvalidError
from vegas_runtime.profile_values import shown

# pydantic's error type -> what is needed, in this file's terms.
_NEEDED: Final = {
    "string_type": "text is needed; put it in quotes",
    "int_type": "a whole number is needed, without quotes",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed, without quotes",
    "bool_type": "true or false is needed, without quotes",
    "finite_number": "that is not a measurement; leave the key out",
    "tuple_type": "a list is needed",
    "model_type": "a section (key: value lines) is needed",
}


def first_problem(
    error: ValidationError, values: Mapping[str, Any], order: list[str], source: str
) -> ProfileInvalidError:
    """One line for pydantic's many: the first problem, and how many more there are.

    Args:
        error: what pydantic found.
        values: the file's plain values.
        order: the file's top-level keys, in the order they are written.
        source: the file's name.
    """
    problems = error.errors(include_url=False)
    more = len(problems) - 1
    tail = f" ({more} more problem{'s' if more > 1 else ''}.)" if more else ""
    return ProfileInvalidError(
        f"{source}: {_described(problems[0])}{tail}", hint=_cut_off_hint(problems[0], values, order)
    )


def _described(problem: ErrorDetails) -> str:
    place = ""
    for part in problem["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    kind, value = problem["type"], shown(problem["input"])
    if kind == "missing":
        return f"`{place}` is missing."
    if kind == "vegas":
        message = problem["msg"]
        return f"`{place}`: {message}" if place else message
    if kind == "string_pattern_mismatch":
        return f"`{place}` is {value}, which does not have the form {problem['ctx']['pattern']}."
    needed = _NEEDED.get(kind) or problem["msg"].replace("Input should be", "it must be")
    return f"`{place}` is {value}; {needed}."


def _cut_off_hint(problem: ErrorDetails, values: Mapping[str, Any], order: list[str]) -> str:
    """Keys are written in a fixed order, so a file without its last ones was likely cut off."""
    present = [key for key in order if key in values]
    if problem["type"] != "missing" or not present:
        return ""
    place = problem["loc"][0]
    was_reached = place in order and order.index(str(place)) < order.index(present[-1])
    return "" if was_reached else "The file looks cut off; restore it or tune again."
