"""Continue a list of raw texts: the shortest way in from Python. To ask an instruct model something, see chat.py."""

from batchinfer import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of hot is"]


def main() -> list[str]:
    llm = LLM("smollm2-135m")
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt!r} -> {result.text!r} ({result.finish_reason})")
    return [result.text for result in results]


if __name__ == "__main__":
    main()
