"""Print the answers of a result file: python show_answers.py prompts.out.jsonl [HOW_MANY]."""

import json
import sys
from pathlib import Path


def main() -> None:
    path = Path(sys.argv[1])
    how_many = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for line in path.read_text(encoding="utf-8").splitlines()[:how_many]:
        row = json.loads(line)
        question = row.get("prompt") or row["messages"][-1]["content"]
        answer = row["generated_text"] if row["error"] is None else f"({row['error']['code']}: {row['error']['message']})"
        print(f"[{row['id']}] {question.strip().splitlines()[-1][:120]}")
        print("    " + answer.strip().replace("\n", "\n    "))


if __name__ == "__main__":
    main()
