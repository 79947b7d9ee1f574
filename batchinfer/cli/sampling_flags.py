"""The flags that say how rows are sampled which do not say so themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any

from batchinfer.cli.flags import count, option, switch
from batchinfer.cli.structure_flags import structure_values
from batchinfer.errors import ConfigError, InputError


@dataclass(frozen=True)
class SamplingFlags:
    """Sampling for rows that do not say otherwise."""

    max_tokens: Annotated[
        int | None, count("Sampling", "--max-tokens", "--max-new-tokens", text="Longest output of a row, in tokens (512).")
    ] = None
    temperature: Annotated[float | None, option("Sampling", "--temperature", "--temp", text="0 takes the most likely token (0).")] = None
    top_p: Annotated[float | None, option("Sampling", "--top-p", text="Keep the likeliest tokens up to this probability (1).")] = None
    top_k: Annotated[int | None, count("Sampling", "--top-k", text="Keep the K likeliest tokens (0: all).")] = None
    min_p: Annotated[float | None, option("Sampling", "--min-p", text="Keep tokens at least this likely beside the best (0).")] = None
    seed: Annotated[int, option("Sampling", "--seed", text="Job seed; each row's own follows from it (0).", metavar="N")] = 0
    stop: Annotated[list[str] | None, option("Sampling", "--stop", text="End a row at this text; may be given again.", metavar="TEXT")] = (
        None
    )
    n: Annotated[int | None, count("Sampling", "-n", "--n", text="Answers to each prompt, which is read once (1).")] = None
    repetition_penalty: Annotated[
        float | None,
        option("Sampling", "--repetition-penalty", text="Above 1: less of what stands in prompt or answer (1).", metavar="X"),
    ] = None
    presence_penalty: Annotated[
        float | None, option("Sampling", "--presence-penalty", text="Above 0: less of what the answer has said, -2 to 2 (0).", metavar="X")
    ] = None
    frequency_penalty: Annotated[
        float | None, option("Sampling", "--frequency-penalty", text="The same for each time that it was said (0).", metavar="X")
    ] = None
    logprobs: Annotated[
        int | None,
        count("Sampling", "--logprobs", text="Tell each token's log-probability and N alternatives (off; 0 is none beside it)."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, count("Sampling, rarely needed", "--prompt-logprobs", text="The same for the prompt's tokens (off).")
    ] = None
    bad_words: Annotated[
        list[str] | None,
        option("Sampling, rarely needed", "--bad-words", text="Never say this; may be given again.", metavar="TEXT"),
    ] = None
    response_format: Annotated[
        str | None,
        option("Sampling", "--response-format", text="Answers as JSON: @FILE or text of a JSON schema, or json_object.", metavar="SCHEMA"),
    ] = None
    choices: Annotated[str | None, option("Sampling", "--choices", text="Each answer is one of these texts.", metavar="A,B,C")] = None
    stop_token_ids: Annotated[
        str | None, option("Sampling, rarely needed", "--stop-token-ids", text="End a row at these token ids.", metavar="ID,ID")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None,
        switch("Sampling, rarely needed", "--include-stop-str-in-output/--no-include-stop-str-in-output", text="Keep the stop text."),
    ] = None
    stop_repetition: Annotated[
        int | None,
        count(
            "Sampling, rarely needed",
            "--stop-repetition",
            text="End a row whose last N tokens are one piece three times or more; finish reason repetition (0: off).",
        ),
    ] = None
    min_tokens: Annotated[int | None, count("Sampling, rarely needed", "--min-tokens", text="No end before this many tokens (0).")] = None
    ignore_eos: Annotated[
        bool | None, switch("Sampling, rarely needed", "--ignore-eos/--no-ignore-eos", text="Go on after the end token.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        switch(
            "Sampling, rarely needed", "--skip-special-tokens/--no-skip-special-tokens", text="Leave special tokens out of the text (on)."
        ),
    ] = None

    def values(self) -> dict[str, Any]:
        """What was given, by parameter name, for `SamplingParams.updated`."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("seed", "response_format", "choices")}
        given |= structure_values(self.response_format, self.choices)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = _id_list(self.stop_token_ids)
        return {name: value for name, value in given.items() if value is not None and value != []}

    def checked_values(self) -> dict[str, Any]:
        """`values`, refused here when no row could use them."""
        from batchinfer.core.request import SamplingParams

        values = self.values()
        try:
            SamplingParams().updated(values)
        except InputError as error:
            flag = re.sub(r"^(\w+)=", lambda name: f"--{name[1].replace('_', '-')} ", str(error))
            raise ConfigError(flag) from None
        return values


def _id_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise ConfigError(f"--stop-token-ids {text!r}: must be token ids with commas between, such as 2,30") from None
