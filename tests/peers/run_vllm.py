"""vLLM on the CPU (`LLM.generate`) on one workload; run by vLLM's own Python, so nothing of batchinfer is imported.

A line of stdout is a JSON object: what it took to load, to answer all rows, and the tokens of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

WARM_UP_ROWS, WARM_UP_TOKENS = 4, 8


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("workload", type=Path)
    given.add_argument("model", type=Path)
    given.add_argument("--max-num-seqs", type=int, default=256)
    given.add_argument("--max-model-len", type=int, default=2048)
    given.add_argument("--answers", type=Path, help="JSONL of answers to write, after the clock has stopped")
    given.add_argument("--warm-up", action="store_true", help="answer a few rows before the clock starts")
    args = given.parse_args()
    with args.workload.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    started = time.perf_counter()
    from vllm import LLM, SamplingParams  # a part of what a start takes

    structured = any("response_format" in row for row in rows)
    llm = LLM(
        str(args.model),
        dtype="bfloat16",
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=True,
        disable_log_stats=True,
        # Compact JSON: a small model left free to write blanks between members may write nothing else.
        **({"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}} if structured else {}),
    )
    loaded = time.perf_counter()
    if args.warm_up:
        few = rows[:WARM_UP_ROWS]  # backwards, so that no prompt of the measured run is in the prefix cache
        prompts = [{"prompt_token_ids": row["prompt_token_ids"][::-1]} for row in few]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True), use_tqdm=False)

    prompts, settings = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows], [settings_of(row) for row in rows]
    began = time.perf_counter()
    answers = llm.generate(prompts, settings, use_tqdm=False)
    ended = time.perf_counter()
    document = {
        "load_s": loaded - started,
        "seconds": ended - began,
        "rows": len(rows),
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
        "output_tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
    }
    print("\n" + json.dumps(document), flush=True)
    if args.answers:
        texts = [answer.outputs[0].text for answer in answers]
        args.answers.write_text("".join(json.dumps({"generated_text": text}) + "\n" for text in texts), encoding="utf-8")


def settings_of(row: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = row["response_format"]["json_schema"]["schema"] if "response_format" in row else None
    return SamplingParams(
        temperature=row.get("temperature", 0),
        max_tokens=row["max_tokens"],
        ignore_eos=row.get("ignore_eos", False),
        structured_outputs=StructuredOutputsParams(json=schema) if schema is not None else None,
    )


if __name__ == "__main__":
    main()
