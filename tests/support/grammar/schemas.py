"""Random JSON schemas with the keywords and nestings that schemas of real programs have, valid and otherwise."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any] | bool

_KEYS = (
    *("a", "b", "name", "id", "item-list", "é", "x y", "a.b", "$ref", "type", 'quo"te', "back\\slash", "tab\t", "0"),
    *("/", "~", "#", "<|im_end|>", ""),
)
_PATTERNS = (
    *("^[a-z]+$", "a", "^\\d{3}-\\d{4}$", "^(foo|bar)$", "[0-9]", "^.{2,5}$", "^\\w+$", "^[^x]*$", "^$", "^\\S+$"),
    *("^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^#([0-9a-fA-F]{3}){1,2}$", "^\\W$", "^[^\\d]{1,3}$", "^\\D$", "x.y", "a$", "^b"),
    *("^[\\w.-]+@[\\w-]+\\.[a-z]{2,}$", "^a\\/b$", "^[a&&b]+$", "^[\\[\\]]$", "^[[a]$", "\\u0041", "\\.", "^(a|b)*c?$"),
    *("(?=a)b", "\\bword\\b", "(a)\\1", "^(?!x)", "[", "a{2", "^[+--]$", "^[~~a]$"),
)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("uri-reference", "regex", "json-pointer", "int32", "double", "password", "color", "idn-email", "iri"),
)
_CONSTANTS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2.5, -0.5, 1e3, "", "a", "yes", "é😀", 'say "hi"', "a\\b"),
    *("line\nbreak", "<|im_end|>", [], {}, [1, "a"], {"a": 1}, {"b": [None], "a": {}}),
)
_ANNOTATIONS: tuple[tuple[str, Any], ...] = (
    *(("title", "T"), ("description", "some text"), ("default", 5), ("examples", [1]), ("$comment", "c")),
    *(("deprecated", True), ("readOnly", False), ("writeOnly", True), ("x-custom", {"a": 1}), ("nullable", True)),
    *(("contentMediaType", "text/plain"), ("contentEncoding", "base64"), ("example", 1), ("xml", {})),
)


def random_schema(rng: random.Random) -> Schema:
    """A whole schema, some with definitions and references, also recursive ones."""
    return _Writer(rng).root()


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.definitions = [f"d{i}" for i in range(rng.choice((0, 0, 1, 2, 3)))]
        self.rare = rng.random() < 0.35
        """Use keywords that few schemas have, and values that are wrong."""
        self.container = rng.choice(("$defs", "$defs", "definitions"))

    def root(self) -> Schema:
        schema = self.schema(rng_depth(self.rng))
        if not isinstance(schema, dict):
            return schema
        if self.definitions:
            schema[self.container] = {name: self.schema(2) for name in self.definitions}
        if self.rng.random() < 0.2:
            drafts = ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema")
            schema["$schema"] = self.rng.choice(drafts)
        return schema

    def schema(self, depth: int) -> Schema:
        rng = self.rng
        if rng.random() < 0.04:
            return rng.random() < 0.8
        kinds = ["object"] * 5 + ["string"] * 4 + ["integer", "number", "boolean", "null", "enum", "const", "any"]
        if depth > 0:
            kinds += ["array"] * 3 + ["anyOf", "oneOf", "allOf", "typed list"]
        if self.definitions:
            kinds += ["reference"] * 2
        schema: dict[str, Any] = getattr(self, "_" + rng.choice(kinds).replace(" ", "_"))(depth)
        if rng.random() < 0.3:
            schema |= dict(rng.sample(_ANNOTATIONS, rng.randint(1, 3)))
        if self.rare and rng.random() < 0.12:
            schema |= self.unusual(depth)
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {"type": "object"} if rng.random() < 0.95 else {}
        names = rng.sample(_KEYS[:6] if rng.random() < 0.8 else _KEYS, rng.randint(0, 4)) if depth > 0 else []
        if names or rng.random() < 0.5:
            schema["properties"] = {name: self.schema(depth - 1) for name in names}
        if rng.random() < 0.7:
            schema["required"] = [name for name in names if rng.random() < 0.6]
            if rng.random() < 0.1:
                schema["required"] += ["other"]
        if rng.random() < 0.6:
            schema["additionalProperties"] = False
        elif rng.random() < 0.4:
            schema["additionalProperties"] = self.schema(depth - 1) if depth > 0 else {"type": "integer"}
        if rng.random() < 0.1:
            schema["patternProperties"] = {
                rng.choice(_PATTERNS): self.schema(depth - 1) for _ in range(rng.randint(1, 2)) if depth > 0
            }
        if rng.random() < 0.12:
            schema["minProperties"] = rng.randint(0, 3)
        if rng.random() < 0.12:
            schema["maxProperties"] = rng.randint(0, 4)
        if rng.random() < 0.04:
            schema["propertyNames"] = rng.choice(({"pattern": "^[a-z]+$"}, {"enum": ["a", "b"]}, {"maxLength": 3}))
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.8:
            schema["items"] = self.schema(depth - 1)
        if rng.random() < 0.2:
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            schema["minItems"] = rng.randint(0, 3)
        if rng.random() < 0.5:
            schema["maxItems"] = rng.randint(0, 5)
        if rng.random() < 0.08:
            schema["uniqueItems"] = rng.random() < 0.5
        if rng.random() < 0.05:
            schema["items"] = [self.schema(depth - 1) for _ in range(2)]
            schema["additionalItems"] = self.schema(depth - 1)
        return schema

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.25:
            schema["minLength"] = rng.randint(0, 4)
        if rng.random() < 0.35:
            schema["maxLength"] = rng.randint(0, 12)
        if rng.random() < 0.2:
            schema["pattern"] = rng.choice(_PATTERNS)
        if rng.random() < 0.15:
            schema["format"] = rng.choice(_FORMATS)
        return schema

    def _number(self, depth: int, kind: str = "number") -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {"type": kind}

        def bound(spread: int) -> float | int:
            number = rng.choice((0, 1, -1, 10, 100, rng.randint(-1000, 1000), 10 ** rng.randint(1, 20)))
            return number if kind == "integer" or rng.random() < 0.5 else number + rng.choice((0.5, 0.25, 0.1))

        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.2:
                schema[name] = bound(100)
        if rng.random() < 0.15:
            schema["multipleOf"] = rng.choice((1, 2, 5, 10, 0.5, 0.1, 0.01, 7, 1e-3, 1.5))
        if rng.random() < 0.1:
            schema["format"] = rng.choice(("int32", "double"))
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        return self._number(depth, "integer")

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def _enum(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"enum": self.rng.sample(_CONSTANTS, self.rng.randint(1, 5))}
        if self.rng.random() < 0.3:
            schema["type"] = self.rng.choice(("string", "integer", "object"))
        return schema

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self.rng.choice(_CONSTANTS)}

    def _any(self, depth: int) -> dict[str, Any]:
        return {}

    def _typed_list(self, depth: int) -> dict[str, Any]:
        types = self.rng.sample(("object", "string", "integer", "number", "null", "array", "boolean"), 2)
        return self._string(depth) | self._object(depth) | {"type": types}

    def _branches(self, depth: int) -> list[Schema]:
        return [self.schema(depth - 1) for _ in range(self.rng.randint(1, 3))]

    def _anyOf(self, depth: int) -> dict[str, Any]:
        schema = self._object(depth - 1) if self.rng.random() < 0.2 else {}
        return schema | {"anyOf": self._branches(depth)}

    def _oneOf(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.5:
            tags = rng.sample(("cat", "dog", "bird"), rng.randint(1, 3))
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": tag}, "v": self.schema(depth - 1)},
                        "required": ["kind"],
                    }
                    for tag in tags
                ]
            }
        return {"oneOf": self._branches(depth)}

    def _allOf(self, depth: int) -> dict[str, Any]:
        schema = self._object(depth - 1) if self.rng.random() < 0.3 else {}
        return schema | {"allOf": self._branches(depth)}

    def _reference(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        target = rng.choice(self.definitions)
        references = [f"#/{self.container}/{target}"] * 9 + ["#", "#/$defs/missing", "https://example.com/s.json"]
        schema: dict[str, Any] = {"$ref": rng.choice(references)}
        return schema | ({"description": "d"} if rng.random() < 0.2 else {})

    def unusual(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        inner = self.schema(depth - 1) if depth > 0 else {"type": "string"}
        return rng.choice(
            (
                {"not": inner},
                {"if": inner, "then": {"required": ["a"]}, "else": {}},
                {"dependentRequired": {"a": ["b"]}},
                {"dependencies": {"a": ["b"]}},
                {"dependentSchemas": {"a": inner}},
                {"contains": inner},
                {"contains": inner, "minContains": 0, "maxContains": 2},
                {"unevaluatedProperties": False},
                {"unevaluatedItems": inner},
                {"$dynamicRef": "#x"},
                {"$anchor": "here"},
                {"$id": "https://example.com/inner.json"},
                {"type": "objekt"},
                {"type": 5},
                {"minLength": -1},
                {"minLength": "3"},
                {"required": "a"},
                {"properties": []},
                {"enum": []},
                {"anyOf": []},
                {"pattern": 7},
                {"multipleOf": 0},
                {"x-guidance": {"lenient": True}},
            )
        )


def rng_depth(rng: random.Random) -> int:
    return rng.choice((1, 2, 2, 3, 3, 4))
