"""OpenVINO GenAI with continuous batching on one workload; run by OpenVINO's own Python, so nothing of batchinfer is imported.

The last line on stdout is a JSON object: what it took to load, to answer all rows, and the tokens of both sides.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

WARM_UP_ROWS, WARM_UP_TOKENS = 4, 8


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("workload", type=Path)
    given.add_argument("model", type=Path)
    given.add_argument("--max-num-seqs", type=int, default=256)
    given.add_argument("--max-num-batched-tokens", type=int, default=256)  # larger budgets were slower
    given.add_argument("--cache-gib", type=int, default=6)
    given.add_argument("--answers", type=Path, help="JSONL of answers to write, after the clock has stopped")
    given.add_argument("--warm-up", action="store_true", help="answer a few rows before the clock starts")
    args = given.parse_args()
    with args.workload.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]

    started = time.perf_counter()
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = args.cache_gib
    scheduling.max_num_seqs = args.max_num_seqs
    scheduling.max_num_batched_tokens = args.max_num_batched_tokens
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(str(args.model), scheduling, "CPU")
    loaded = time.perf_counter()
    if args.warm_up:
        few = rows[:WARM_UP_ROWS]  # backwards, so that no prompt of the measured run is in the prefix cache
        pipeline.generate([tensor(row["prompt_token_ids"][::-1]) for row in few], [fixed_length(WARM_UP_TOKENS)] * len(few))

    prompts, settings = [tensor(row["prompt_token_ids"]) for row in rows], [settings_of(row) for row in rows]
    began = time.perf_counter()
    answers = pipeline.generate(prompts, settings)
    ended = time.perf_counter()
    ids = [list(answer.m_generation_ids[0]) for answer in answers]
    document = {
        "load_s": loaded - started,
        "seconds": ended - began,
        "rows": len(rows),
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
        "output_tokens": sum(map(len, ids)),
    }
    print(json.dumps(document), flush=True)
    if args.answers:
        texts = [pipeline.get_tokenizer().decode(one) for one in ids]
        args.answers.write_text("".join(json.dumps({"generated_text": text}) + "\n" for text in texts), encoding="utf-8")


def tensor(ids: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([ids], np.int64))


def fixed_length(tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    return config


def settings_of(row: dict[str, Any]) -> genai.GenerationConfig:
    config = fixed_length(row["max_tokens"])
    config.ignore_eos = row.get("ignore_eos", False)
    temperature = row.get("temperature", 0)
    if temperature:
        config.do_sample, config.temperature = True, temperature
    if "response_format" in row:
        schema = row["response_format"]["json_schema"]["schema"]
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(schema))
    return config


if __name__ == "__main__":
    main()
