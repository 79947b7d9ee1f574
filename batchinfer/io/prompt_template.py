"""`--prompt-template`: prompts built from any columns by a Jinja template, in the sandbox that chat templates run in."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.meta

from batchinfer.errors import ConfigError, InputError
from batchinfer.io.chat_sandbox import BUDGET, Budget, SandboxedTemplates, characters_of
from batchinfer.io.chat_template import render_bounded

MAX_TEMPLATE_CHARACTERS = 1 << 20
ROW = "row"  # the whole row by this name, for columns whose names are no identifiers: {{ row["my column"] }}
NAME = "the prompt template"


class PromptTemplate:
    """A compiled prompt template. `columns` are the names that it uses; `whole_row`: any further one may be."""

    def __init__(self, source: str) -> None:
        """Compile; `ConfigError` says what is wrong."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ConfigError(f"--prompt-template: longer than {MAX_TEMPLATE_CHARACTERS:,} characters")
        environment = SandboxedTemplates(strict=True)
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"--prompt-template: syntax error in line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as error:
            raise ConfigError(f"--prompt-template: cannot be compiled: {error}") from None
        known = {*environment.globals, BUDGET}
        self.columns = tuple(sorted(name for name in names if name not in known))
        self.whole_row = ROW in self.columns
        if not self.columns:
            raise ConfigError("--prompt-template names no column, so that every row would get the same prompt; write {{ column }}")

    def render(self, values: dict[str, Any]) -> str:
        """The row's prompt; a column that the row does not have, or one that is null and written, is the row's error."""
        variables = {ROW: values, **values, BUDGET: Budget(characters_of(values))}
        text = render_bounded(self._template, variables, NAME, "row")
        if not text.strip():
            raise InputError(f"{NAME} writes nothing for this row", "empty_prompt")
        return text
