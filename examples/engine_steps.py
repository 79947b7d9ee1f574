"""Drive the engine step by step: rows join and leave the batch while others run."""

import numpy as np

from batchinfer import EngineConfig, Request, SamplingParams
from batchinfer.build import build_engine, open_model


def main() -> dict[int, str]:
    config = EngineConfig(model="smollm2-135m", max_num_seqs=2)
    model = open_model(config)
    engine = build_engine(config, model)
    for row, text in enumerate(["One, two, three,", "Monday, Tuesday,", "red, green,"]):
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        engine.add(Request(row, np.array(ids, np.int32), SamplingParams(max_tokens=6 + row)))
    texts: dict[int, str] = {}
    step = 0
    while engine.num_unfinished:
        step += 1
        for result in engine.step():
            texts[result.row] = result.text
            print(f"step {step}: row {result.row} ended with {result.text!r}")
    return texts


if __name__ == "__main__":
    main()
