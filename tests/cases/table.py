"""Which command lines try each case, and what waits for a later version. Flags follow each case's expect.md."""

# ruff: noqa: RUF005  (sums of tuples keep the rows of the table apart)
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

TINY = "--dtype float32"  # the tiny models' references were computed in float32


@dataclass(frozen=True)
class Try:
    """One `batchinfer run`, judged by the case's check.py unless it must be refused.

    Places in `input`, `model`, `output`, `setup` and `shell`: {case} is the case's folder, {cases} the folder of all
    cases, {work} the folder of the try, {models} the folder that the case's make.py filled, {run} the start of a
    `batchinfer run` for the driver in `_lib`, {gguf} the default model's file.
    """

    label: str = ""
    input: str = "{case}/input.jsonl"
    flags: str = ""
    model: str = "{gguf}"
    variant: str | None = None
    output: str = "{work}/out.jsonl"
    no_chat: bool = True
    refused: str | None = None  # must exit non-zero and say this word; the case's check is not asked
    sentinel: bool = False  # a file that stands at the output path must be left alone
    setup: str | None = None  # shell commands before, in the folder of the try
    shell: str = '"$@"'  # how the command is started
    known: tuple[str, ...] = ()  # findings that name one of these wait for a later version
    driven: bool = False  # the driver is the judge: its exit code is the verdict
    env: tuple[tuple[str, str], ...] = ()  # for the check
    timeout: int = 300


@dataclass(frozen=True)
class Case:
    """The tries of one case; `waits` names what of it a later version brings."""

    tries: tuple[Try, ...] = ()
    waits: str | None = None


def each(values: Iterable[str], make: Callable[[str], Try]) -> tuple[Try, ...]:
    """One try for each value, labelled with it."""
    return tuple(replace(make(value), label=value) for value in values)


def tiny(*variants: str, input: str = "{case}/input.jsonl", suffix: str = "") -> tuple[Try, ...]:  # noqa: A002
    """Tries of tiny models that the case's make.py writes, named as their variants."""
    return each(variants, lambda v: Try(model="{models}/" + v + suffix, variant=v, flags=TINY, input=input))


def refused(word: str, *variants: str, flags: str = TINY) -> tuple[Try, ...]:
    """Tries of models that must be refused with a message that holds the word."""
    return each(variants, lambda v: Try(model="{models}/" + v, flags=flags, refused=word))


def bad_flags(*flags: str) -> tuple[Try, ...]:
    """Settings that no machine can run: refused at start."""
    return each(flags, lambda f: Try(flags=f, refused="", timeout=60))


ONE = (Try(),)
IMPOSSIBLE = (
    "--kv-cache-memory 10TB",
    "--max-model-len 1000000000",
    "--max-num-seqs 0",
    "--max-num-seqs -1",
    "--max-num-seqs 1000000000",
    "--block-size 0",
    "--block-size 3",
    "--block-size 1000000",
    "--threads 0",
)
DRIVE = "python3 {cases}/_lib/drive.py "
KILLED = "--cmd '{run} {i} -m {gguf} --no-chat -o {o}' -i {case}/input.jsonl -o {work}/out.jsonl "
GOING_ON = "{case}/input.jsonl -m {gguf} --no-chat -o {work}/out.jsonl"
KILLED_ONCE = DRIVE + "signal " + KILLED + "--rows 6 --signal KILL > driven.txt"
FLAT = (
    'python3 -c \'import json; big, small = (json.load(open(name))["peak_rss_mb"] for name in '
    '("out.jsonl.report.json", "small.out.jsonl.report.json")); assert big < small + 50, (big, small)\''
)
PADDED = (
    'python3 -c \'import json; rows = [json.loads(line) for line in open("out.jsonl")]; '
    'assert rows and all(row["generated_text"] in ("yes", "no") for row in rows), rows; '
    'ids = [top["token_id"] for row in rows for told in row["output_logprobs"] for top in (told, *told["top"])]; '
    "assert max(ids) < 262, max(ids)'"
)
ODD_STARTS = {
    "empty environment": 'env -i PATH="$PATH" HOME="$HOME" LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 "$@"',
    "stdin closed": '"$@" <&-',
    "no HOME": 'env -u HOME "$@"',
    "HOME not writable": 'env HOME=/proc "$@"',
    "64 open files": 'ulimit -n 64; "$@"',
    "under a threaded program": (
        "python3 -c 'import subprocess, sys, threading; threading.Thread(target=lambda: None).start(); "
        'sys.exit(subprocess.run(sys.argv[1:]).returncode)\' "$@"'
    ),
}
BAD_GGUF = ("bad-short.gguf", "bad-magic.gguf", "bad-version.gguf", "bad-ntensors.gguf", "bad-nkv.gguf", "bad-head.gguf", "bad-zero.gguf")
BAD_SAFETENSORS = (
    "short", "cut-header", "zero", "huge-header", "neg-header", "shape-offset-mismatch", "offset-past-end", "bad-dtype", "wrong-shape",
)  # fmt: skip

CASES: dict[str, Case] = {
    "eng-batch-invariance": Case(
        each(["1", "2", "3", "16"], lambda n: Try(flags=f"--max-num-seqs {n}"))
        + (Try("reversed", input="{case}/reversed.jsonl", variant="reversed"),)
    ),
    "eng-chunked-prefill-budgets": Case(
        each(["1", "7", "15", "16", "17", "64", "100000"], lambda n: Try(flags=f"--max-num-batched-tokens {n}"))
        + bad_flags("--max-num-batched-tokens 0", "--max-num-batched-tokens -5")
    ),
    "eng-impossible-memory-settings": Case(bad_flags(*IMPOSSIBLE)),
    "eng-kv-pool-too-small-for-one": Case(
        (Try("256 tokens", flags="--block-size 16 --num-kv-blocks 16", timeout=120),) + bad_flags("--num-kv-blocks 1", "--num-kv-blocks 0")
    ),
    "eng-kv-quantised-accuracy": Case(
        tuple(
            Try(f"{dtype}{' no cache' if off else ''}", flags=f"--kv-cache-dtype int8 --dtype {dtype} {off}")
            for dtype in ("auto", "float32")
            for off in ("", "--no-prefix-caching")
        ),
        waits="an fp8 KV cache",
    ),
    "eng-prefix-cache-block-boundary": Case(
        tuple(
            Try(f"block {size}{' no cache' if off else ''}", flags=f"--block-size {size} {off}")
            for size in (16, 32, 64)
            for off in ("", "--no-prefix-caching")
        )
    ),
    "eng-spec-decode-greedy-equality": Case(
        (Try("speculation off"), Try("guesses by benefit", flags="--speculative ngram"))
        + tuple(Try(f"{k} guesses", flags=f"--speculative ngram --num-speculative-tokens {k}") for k in (4, 8))
    ),
    "eng-start-from-odd-environment": Case(
        tuple(Try(label, shell=shell) for label, shell in ODD_STARTS.items())
        + (Try("odd output name", output="{work}/an öutput, 出力.jsonl"),)
    ),
    "eng-streaming-memory": Case(
        (
            Try(
                "300,000 rows beside 1,000, fake model",
                input="{work}/big.jsonl",
                flags="--fake-model --max-tokens 4 -q",
                setup="python3 {case}/make.py big.jsonl && head -n 1000 big.jsonl > small.jsonl",
                shell='"$@" && {run} small.jsonl -m {gguf} --no-chat --fake-model --max-tokens 4 -q -o small.out.jsonl && ' + FLAT,
                driven=True,
            ),
        )
    ),
    "in-bad-utf8-line": Case(ONE),
    "in-bom-first-record": Case(ONE),
    "in-crlf-blank-lines": Case(ONE),
    "in-directory-mixed-schemas": Case(
        (
            Try("folder", input="{case}/in", refused="kind"),
            Try("parquet alone", input="{work}/in", setup="cp -r {case}/in in && rm in/*.jsonl"),
            Try(
                "output inside, again",
                input="{work}/in",
                output="{work}/in/out.jsonl",
                setup="cp -r {case}/in in && rm in/*.jsonl",
                shell='"$@" && "$@" --overwrite || "$@" --overwrite',
            ),
            Try("pattern", input="{case}/in/*.parquet"),
        ),
    ),
    "in-empty-null-prompts": Case(ONE),
    "in-giant-line": Case((Try(input="{work}/big.jsonl", setup="python3 {case}/make.py big.jsonl", timeout=180),)),
    "in-id-types": Case(ONE),
    "in-malformed-middle": Case(ONE),
    "in-message-shapes": Case(ONE),
    "in-missing-or-int-prompt-column": Case(
        each(["noprompt.jsonl", "noprompt.parquet", "intprompt.parquet"], lambda f: Try(input="{case}/" + f))
    ),
    "in-nan-in-json": Case(ONE),
    "in-non-object-lines": Case(ONE),
    "in-parquet-list-struct": Case((Try(input="{case}/input.parquet"),)),
    "in-truncated-parquet": Case(
        each(
            ["cutfooter.parquet", "head4.parquet", "nofooter.parquet", "notparquet.parquet", "zero.parquet"],
            lambda f: Try(input="{case}/" + f, sentinel=True),
        )
    ),
    "in-type-flips-jsonl": Case((Try("jsonl"), Try("parquet", output="{work}/out.parquet"))),
    "in-unknown-or-mistyped-params": Case(
        (
            Try("flat"),
            Try(
                "as OpenAI lines", input="{work}/in.jsonl", setup="python3 {cases}/_lib/adapt.py {case}/input.jsonl in.jsonl --shape openai"
            ),
            Try(
                "unknown fields, each an error",
                input="{case}/openai.jsonl",
                shell='"$@"; [ $? = 3 ] && [ $(wc -l < {case}/openai.jsonl) = $(wc -l < out.errors.jsonl) ]',
                driven=True,
            ),
        )
    ),
    "in-zero-rows": Case(
        tuple(
            Try(f"{name} to {kind}", input="{case}/" + name, output="{work}/out." + kind)
            for name in ("blank.jsonl", "empty.jsonl", "empty.jsonl.gz", "emptygroup.parquet", "nogroup.parquet")
            for kind in ("jsonl", "parquet")
        )
    ),
    "out-disk-full": Case(
        (
            Try("/dev/full", flags="-o /dev/full", refused="no space left"),
            Try("files of 4 KiB, then of any size", shell='(ulimit -f 4; "$@"); [ $? = 1 ] && [ ! -e out.jsonl ] && "$@"', driven=True),
            Try(
                "to Parquet",
                output="{work}/out.parquet",
                shell='(ulimit -f 4; "$@"); [ $? = 1 ] && [ ! -e out.parquet ] && "$@"',
                driven=True,
            ),
        )
    ),
    "out-failed-row-shape-and-summary": Case(ONE),
    "out-kill9-and-resume": Case(
        (
            Try("one whole run"),
            Try("killed three times", shell=DRIVE + "killresume " + KILLED + "--rows 5 --times 3", timeout=600),
            Try("interrupted", shell=DRIVE + "signal " + KILLED + "--signal INT --rows 6; {run} " + GOING_ON, timeout=600),
            Try("terminated while it loads", shell=DRIVE + "signal " + KILLED + "--signal TERM --after 1; {run} " + GOING_ON, timeout=600),
            Try(
                "three shards",
                shell="for i in 1 2 3; do {run} {case}/input.jsonl -m {gguf} --no-chat -o part$i.jsonl --shard $i/3 || exit 1; done; "
                "cat part?.jsonl > out.jsonl",
            ),
        )
    ),
    "out-path-equals-input-or-exists": Case(
        each(
            ["{work}/in.jsonl", "{work}/sub/../in.jsonl", "{work}/link.jsonl", "{work}/hard.jsonl", "{work}/there.jsonl", "{work}/sub"],
            lambda path: Try(
                input="{work}/in.jsonl",
                output=path,
                setup="cp {case}/input.jsonl in.jsonl; mkdir -p sub; ln -s in.jsonl link.jsonl; ln in.jsonl hard.jsonl; echo other > there.jsonl",
                env=(("IN_COPY", "{work}/in.jsonl"),),
            ),
        )
        + (Try("no such folder", output="{work}/nowhere/out.jsonl"),),
    ),
    "out-resume-after-change": Case(
        (
            Try("other rows", input="{case}/changed.jsonl", setup=KILLED_ONCE),
            Try("other sampling", flags="--temperature 0.5", setup=KILLED_ONCE, refused="temperature"),
        )
    ),
    "out-stdout-purity-and-broken-pipe": Case(
        (
            Try("whole", flags="-o -", shell='"$@" > out.jsonl'),
            Try("stdin", input="-", flags="-o -", shell='cat {case}/input.jsonl | "$@" > out.jsonl'),
            Try(
                "reader goes away",
                shell=DRIVE + "pipe --cmd '{run} {case}/input.jsonl -m {gguf} --no-chat -o -' --lines 1",
                driven=True,
            ),
        )
    ),
    "sam-greedy-equivalents": Case(ONE),
    "sam-logit-bias": Case(ONE),
    "sam-logprobs-shape": Case(ONE),
    "sam-max-tokens-extremes": Case(ONE),
    "sam-n-greater-one": Case(ONE),
    "sam-prompt-at-context-limit": Case((Try(flags="--max-model-len 64"),)),
    "sam-topk-topp-limits": Case(ONE),
    "so-bad-schema-isolated": Case(ONE),
    "so-enum-unicode-and-escapes": Case(ONE),
    "so-integer-bounds": Case(ONE),
    "so-many-schemas-in-one-batch": Case(
        each(
            [
                "",
                "--max-num-seqs 1",
                "--max-num-seqs 16",
                "--block-size 16 --num-kv-blocks 24",
                "--speculative ngram --num-speculative-tokens 4",
            ],
            lambda f: Try(flags=f),
        )
    ),
    "so-recursive-schemas": Case(ONE),
    "so-whitespace-runaway": Case(ONE),
    "tok-double-bos-and-template": Case(ONE),
    "tok-ignore-eos": Case(ONE),
    "tok-leading-space-kept": Case(ONE),
    "tok-min-tokens-vs-stops": Case(ONE),
    "tok-multibyte-across-tokens": Case(ONE),
    "tok-stop-strings-across-tokens": Case(ONE),
    "tok-stop-token-ids-and-specials": Case(ONE),
    "tok-template-missing-or-raising": Case(tiny("none", "nosys", "broken", "undef", "loop")),
    "tok-vocab-padding": Case(
        tiny("padded")
        + (
            Try(
                "structures and log-probabilities",
                model="{models}/padded",
                flags=TINY + " --choices yes,no --logprobs 5",
                shell='"$@" && ' + PADDED,
                driven=True,
            ),
        )
    ),
    "wt-awq-nibble-order": Case(refused("awq", "awq"), waits="AWQ (refused by name until then)"),
    "wt-bf16-on-cpu": Case(tiny("bf16", "bf16-dtypekey", "mixed")),
    "wt-bias-headdim-qknorm": Case(
        tiny("llama-bias", input="{case}/input.llama-bias.jsonl")
        + refused("qwen2", "qwen2")
        + refused("qwen3", "qwen3")
        + refused("q_norm", "unexpected"),
        waits="Qwen (refused by name until then)",
    ),
    "wt-corrupt-safetensors-gguf": Case(each([*BAD_SAFETENSORS, *BAD_GGUF], lambda v: Try(model="{models}/" + v, flags=TINY, timeout=60))),
    "wt-eos-list-in-generation-config": Case(tiny("list", "nogen")),
    "wt-gguf-dequant-types": Case((Try("kq", model="{case}/kq.gguf", variant="kq", flags=TINY),)),
    "wt-gguf-permuted-qk": Case(
        tiny("llama")
        + (Try("llama.gguf", model="{models}/llama.gguf", variant="llama", flags=TINY),)
        + refused("qwen2", "qwen2", "qwen2.gguf"),
        waits="Qwen (refused by name until then)",
    ),
    "wt-gptq-zero-points-actorder": Case(
        refused("gptq", "gptq-v1-actorder", "gptq-v2-actorder", "gptq-v1-sym"), waits="GPTQ (refused by name until then)"
    ),
    "wt-hf-cache-symlinks": Case(
        tiny("link", "dangling")
        + (Try("snapshot", model="{models}/models--org--tiny/snapshots/abc123", variant="snapshot", flags=TINY),)
        + (Try("snapshot, slash at the end", model="{models}/models--org--tiny/snapshots/abc123/", variant="snapshot", flags=TINY),)
    ),
    "wt-missing-shard": Case(
        tiny("complete", "missing", "missing-key", "extra-file") + (Try("dup", model="{models}/dup", variant="complete", flags=TINY),)
    ),
    "wt-tied-embeddings": Case(
        tiny("tied", "tied-stale", "untied-missing") + (Try("gguf-tied", model="{models}/gguf-tied.gguf", variant="gguf-tied", flags=TINY),)
    ),
}
