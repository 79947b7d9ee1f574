"""Answer several conversations at once, each with sampling of its own."""

from batchinfer import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
QUESTIONS = ["What is the capital of Italy?", "Why do leaves fall in autumn?"]


def main() -> list[str]:
    llm = LLM("smollm2-135m", max_num_seqs=8)
    conversations = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.7, seed=1)]
    results = llm.chat(conversations, params)
    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"{question}\n    {result.text}")
    return [result.text for result in results]


if __name__ == "__main__":
    main()
