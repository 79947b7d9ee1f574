"""Answers that fit: JSON by a schema, and one of a few labels. `python examples/structured.py`"""

from __future__ import annotations

import json
from pathlib import Path

from batchinfer import LLM, SamplingParams

SCHEMA = json.loads(Path(__file__).with_name("person.schema.json").read_text())


def main() -> list[str]:
    """Facts from a text as JSON, and its mood."""
    llm = LLM("smollm2-135m")
    text = "Lena Berg plays in Oslo on 12 July."
    asked = [
        ([{"role": "user", "content": f"Who, where, when? {text}"}], SamplingParams(max_tokens=128, structured_outputs={"json": SCHEMA})),
        ([{"role": "user", "content": f"Is this good news? {text}"}], SamplingParams(structured_outputs={"choice": ["yes", "no"]})),
    ]
    results = llm.chat([messages for messages, _ in asked], [params for _, params in asked], progress=False)
    return [result.text for result in results]


if __name__ == "__main__":
    for answer in main():
        print(answer)
