"""What the JSON-schema job asks for: records that people take out of texts, each bounded, so that every answer can end."""

from __future__ import annotations

from typing import Any


def _record(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def _count(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list_of(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


def _one_of(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": _record(name=_text(30), age=_count(0, 120), town=_text(30), married={"type": "boolean"}),
    "an invoice": _record(
        number=_count(1, 99999),
        customer=_text(30),
        lines=_list_of(_record(item=_text(20), quantity=_count(1, 99), cents=_count(0, 100000)), 2),
        paid={"type": "boolean"},
    ),
    "a support ticket": _record(
        subject=_text(40),
        severity=_one_of("low", "normal", "high", "urgent"),
        product=_one_of("oven", "lamp", "heater", "clock"),
        needs_reply={"type": "boolean"},
    ),
    "a review": _record(
        sentiment=_one_of("positive", "negative", "mixed"),
        stars=_count(1, 5),
        reasons=_list_of(_text(30), 3),
        recommends={"type": "boolean"},
    ),
    "an event": _record(
        title=_text(40),
        place=_record(town=_text(20), street=_text(30)),
        day=_count(1, 31),
        month=_count(1, 12),
        kind=_one_of("market", "concert", "meeting", "race"),
    ),
    "a recipe": _record(title=_text(30), minutes=_count(1, 600), ingredients=_list_of(_text(20), 4), vegetarian={"type": "boolean"}),
}
