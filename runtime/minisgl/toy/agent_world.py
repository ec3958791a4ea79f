"""The closed world of the agent model: its tools, and exchanges with and without calls.

All names and values are known from the training; the combinations of questions and values are not. One in
eight of them is held out for the judgement of the model.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

Arguments: TypeAlias = Mapping[str, Any]

CITIES: Final = (
    "Paris",
    "London",
    "Berlin",
    "Rome",
    "Madrid",
    "Vienna",
    "Oslo",
    "Tokyo",
    "Cairo",
    "Delhi",
    "Lima",
    "Athens",
    "Dublin",
    "Prague",
    "Boston",
    "Chicago",
    "Sydney",
    "Kyoto",
    "Zurich",
    "Hamburg",
)
ROOMS: Final = ("kitchen", "bedroom", "bathroom", "office", "garage", "hall", "attic", "cellar", "library", "studio")
FOODS: Final = ("pizza", "sushi", "curry", "pasta", "soup", "noodles", "cake", "salad")
PLACES: Final = ("Bella", "Luna", "Olive", "Lotus", "Corner", "Harbor", "Garden", "Anchor")
SKIES: Final = ("sunny", "cloudy", "rainy", "windy")
_MINUTES: Final = ("00", "15", "30", "45")
NUMBERS: Final = range(31)
"""Numbers in questions. Results are up to MAX_RESULT."""
MAX_RESULT: Final = 100

NO_TOOL: Final = "I have no tool for that."
_HELD_OUT: Final = 8
_SHARES: Final = {"add": 1.5, "multiply": 1.5, "set_light": 1.5}
"""Tools that are needed more often than others: their arguments are harder to learn."""
_PERTURBED: Final = 0.3


class Tool(NamedTuple):
    """A tool with what is asked of it. Questions, results and answers have the names of values in braces."""

    name: str
    description: str
    properties: Mapping[str, Any]
    """JSON schema of each parameter; all are required."""
    questions: Sequence[str]
    result: str
    answer: str
    values: Mapping[str, Any] = MappingProxyType({})
    """Values that the questions imply."""

    @property
    def definition(self) -> dict[str, Any]:
        """As `tools` of a request has it."""
        schema = {"type": "object", "properties": dict(self.properties), "required": list(self.properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class Exchange(NamedTuple):
    """A question and its answer, with the tool that it needs."""

    question: str
    answer: str
    tool: Tool | None = None
    is_offered: bool = False
    """True: the tool is called, with `arguments`. False: the answer needs none, or a missing one."""
    arguments: Arguments = MappingProxyType({})
    result: str = ""


_CITY: Final = {"city": {"type": "string", "description": "Name of the city"}}
_OPERANDS: Final = {"a": {"type": "number"}, "b": {"type": "number"}}
_LIGHT: Final = {"room": {"type": "string"}, "on": {"type": "boolean"}}

_SKILLS: Final = (
    Tool(
        "get_weather",
        "Get the current weather in a city",
        _CITY,
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What is the weather like in {city}?",
            "Tell me the weather in {city}",
            "Is the weather good in {city}?",
            "Do I need an umbrella for the weather in {city}?",
        ),
        "{sky}, {degrees} degrees",
        "It is {sky} in {city}, {degrees} degrees.",
    ),
    Tool(
        "get_time",
        "Get the local time in a city",
        _CITY,
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}",
            "What is the local time in {city}?",
        ),
        "{hour}:{minute}",
        "It is {hour}:{minute} in {city}.",
    ),
    Tool(
        "add",
        "Add two numbers",
        _OPERANDS,
        ("What is {a} + {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?"),
        "{number}",
        "The result is {number}.",
    ),
    Tool(
        "multiply",
        "Multiply two numbers",
        _OPERANDS,
        (
            "What is {a} * {b}?",
            "What is {a} times {b}?",
            "How much is {a} times {b}?",
            "What is the product of {a} and {b}?",
        ),
        "{number}",
        "The result is {number}.",
    ),
    Tool(
        "set_light",
        "Turn the light in a room on or off",
        _LIGHT,
        ("Turn on the light in the {room}", "Turn the light in the {room} on", "Light on in the {room}!"),
        "on",
        "The light in the {room} is on.",
        {"on": True},
    ),
    Tool(
        "set_light",
        "Turn the light in a room on or off",
        _LIGHT,
        ("Turn off the light in the {room}", "Turn the light in the {room} off", "Light off in the {room}!"),
        "off",
        "The light in the {room} is off.",
        {"on": False},
    ),
    Tool(
        "find_food",
        "Find a place that serves a dish",
        {"food": {"type": "string"}, **_CITY},
        ("Where can I eat {food} in {city}?", "Find {food} in {city}", "I want to eat {food} in {city}"),
        "{place}",
        "The place is {place}.",
    ),
)
TOOLS: Final[Mapping[str, Tool]] = {skill.name: skill for skill in reversed(_SKILLS)}

ASIDE: Final = (
    *(
        (question, "Hello! Ask me for something that my tools can do.")
        for question in ("Hello", "Hi", "Good morning", "Hey there")
    ),
    *(
        (question, "I am a very small model that can think and call tools.")
        for question in ("Who are you?", "What are you?", "Tell me about yourself", "Which model are you?")
    ),
    *((question, "You are welcome.") for question in ("Thank you", "Thanks", "Great, thank you", "Thanks a lot")),
)
IRRELEVANT: Final = (
    "Who wrote Faust?",
    "How tall is the tower in {city}?",
    "How many people live in {city}?",
    "Book a flight to {city}",
    "Write a poem about the {room}",
    "Tell me a story about {city}",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Translate {food} into French",
    "Which color does {food} have?",
    "Is {a} a prime number?",
    "Play some music in the {room}",
)


class Form(NamedTuple):
    """A way to ask for a tool."""

    number: int
    skill: Tool
    question: str

    def draw(self, source: random.Random, tools: Collection[str], *, held_out: bool) -> Exchange:
        """Draw values, of a question that is held out or of one that is not; `tools` are offered."""
        while True:
            values = {**_values(source), **self.skill.values}
            if self._is_held_out(values) == held_out:
                break
        question = self.question.format(**values)
        if self.skill.name not in tools:
            return Exchange(question, NO_TOOL, self.skill)
        arguments = {name: values[name] for name in self.skill.properties}
        answer, result = self.skill.answer.format(**values), self.skill.result.format(**values)
        return Exchange(question, answer, self.skill, True, arguments, result)

    def _is_held_out(self, values: Mapping[str, Any]) -> bool:
        """Every form has values that are held out, and each value has forms with which it is trained."""
        places = (_CHOICES[name].index(values[name]) for name in self.skill.properties if name in _CHOICES)
        return (self.number + sum(places)) % _HELD_OUT == 0


_CHOICES: Final[Mapping[str, Sequence[Any]]] = {
    "city": CITIES,
    "room": ROOMS,
    "food": FOODS,
    "a": NUMBERS,
    "b": NUMBERS,
}
FORMS: Final = tuple(
    Form(number, skill, question)
    for number, (skill, question) in enumerate((skill, question) for skill in _SKILLS for question in skill.questions)
)


def draw(source: random.Random, tools: Collection[str], *, held_out: bool) -> Exchange:
    """Draw an exchange of a conversation with these tools: mostly one that needs one of them, with a question that is
    held out, or none that is."""
    kind = source.random()
    if kind < 0.08:
        return Exchange(*source.choice(ASIDE))
    if kind < 0.16:
        question = fill(source, source.choice(IRRELEVANT))
        return Exchange(question if held_out else _perturbed(source, question), NO_TOOL)
    missing = [tool for tool in TOOLS if tool not in tools]
    choice = list(tools) if tools and (kind < 0.6 or not missing) else missing
    [needed] = source.choices(choice, [_SHARES.get(tool, 1.0) for tool in choice])
    form = source.choice([form for form in FORMS if form.skill.name == needed])
    exchange = form.draw(source, tools, held_out=held_out)
    return exchange if held_out else exchange._replace(question=_perturbed(source, exchange.question))


def fill(source: random.Random, question: str) -> str:
    """Return the question with random values."""
    return question.format(**_values(source))


def thought(exchange: Exchange) -> str:
    """Return the reasoning before the first answer."""
    if exchange.tool is None:
        return "No tool fits." if exchange.answer == NO_TOOL else "I need no tool."
    if not exchange.is_offered:
        return f"I need {exchange.tool.name}, which is missing."
    values = " and ".join(str(value) for value in exchange.arguments.values() if not isinstance(value, bool))
    return f"I need {exchange.tool.name} for {values}."


RESULT_THOUGHT: Final = "Done."
"""Reasoning before the answer with a result."""


def words() -> tuple[str, ...]:
    """Return all values, which are not in every sample of conversations."""
    return (*CITIES, *ROOMS, *FOODS, *PLACES, *SKIES, *_MINUTES, *map(str, range(MAX_RESULT + 1)))


def _values(source: random.Random) -> dict[str, Any]:
    return {
        "city": source.choice(CITIES),
        "room": source.choice(ROOMS),
        "food": source.choice(FOODS),
        "place": source.choice(PLACES),
        "sky": source.choice(SKIES),
        "degrees": source.randrange(41),
        "hour": source.randrange(24),
        "minute": source.choice(_MINUTES),
        "a": source.choice(NUMBERS),
        "b": source.choice(NUMBERS),
        "number": source.randrange(MAX_RESULT + 1),
    }


def _perturbed(source: random.Random, question: str) -> str:
    """Change the question a little, in a part of the cases."""
    if source.random() > _PERTURBED:
        return question
    return source.choice(
        (question.rstrip("?"), question[0].lower() + question[1:], f"Please: {question}", question + " Please!")
    )
