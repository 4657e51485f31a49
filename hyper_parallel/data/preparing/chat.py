"""Conversations as text, and which of it is trained.

Note [What the model is to say]
Before an assistant's turn the model is given the messages so far and the generation prompt; it has to say the rest of
that turn, the end of the turn included. So the template is rendered twice, up to that point and with the turn, and the
difference is what is trained. No token id and no mark of the template says what counts: one that is used as padding
too, or a template without marks, would train the wrong tokens silently. It holds only where each rendering is a
beginning of the whole conversation; a template that rewrites earlier turns is an error that shows the place.

Rendering depends on nothing but the messages: ``strftime_now``, which some templates ask for, is not defined, and they
use their own date then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.data.preparing.tokenizer import Span, Tokenizer

__all__ = ["CHATML", "ChatTemplate", "Message", "load_chat_template", "trained_tokens"]

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHOWN = 40  # characters to either side of a difference


class ChatTemplate:
    """A Jinja template in Hugging Face's format, rendered in a sandbox."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", name: str = "the chat template") -> None:
        self.source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._name = name
        self._template = _compiled(source, name)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Any = None) -> str:
        """The text of a conversation; ``tools`` are those that the model is told of."""
        try:
            return str(
                self._template.render(
                    messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, **self._names
                )
            )
        except Exception as error:  # the template is a program: 1 // 0, or a macro that calls itself without end
            raise ValueError(f"{self._name} cannot render these messages: {error}") from error

    def render_trained(self, messages: Sequence[Message], *, tools: Any = None) -> tuple[str, list[Span]]:
        """(the text of a conversation, the stretches of it that are trained)."""
        whole = self.render(messages, tools=tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self.render(messages[:number], add_generation_prompt=True, tools=tools)
            said = self.render(messages[: number + 1], tools=tools)
            for part, what in ((asked, "before it, with the generation prompt,"), (said, "up to and with it")):
                if not whole.startswith(part):
                    raise ValueError(
                        f"message {number}: the messages {what} are not rendered as the beginning of the whole "
                        f"conversation, so what is trained cannot be told; {_difference(part, whole)}. Give each turn "
                        "a row of its own, or a chat template that does not rewrite earlier turns"
                    )
            if len(said) < len(asked):
                raise ValueError(
                    f"message {number}: with the assistant's message the conversation is rendered shorter than with "
                    f"the generation prompt alone; {_difference(asked, said)}. Give a chat template whose generation "
                    "prompt begins the assistant's turn"
                )
            spans.append((len(asked), len(said)))
        return whole, spans


def trained_tokens(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens of a text, which hold something of ``spans``, how many of these hold something before their span too)."""
    ids, places = tokenizer.spans(text)
    starts, ends = np.array(places, np.int64).reshape(-1, 2).T
    trained, straddling = np.zeros(len(ids), bool), 0
    for start, end in spans:
        inside = (starts < end) & (ends > start)
        straddling += int((inside & (starts < start)).sum())
        trained |= inside
    return ids, trained, straddling


def load_chat_template(name: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """A template by name: ``"chatml"``, ``"none"``, a file, or (None) that of the tokenizer; ChatML for bytes."""
    if name == "none":
        return None
    what = "the chat template"
    if name == "chatml" or (name is None and tokenizer.folder is None):
        source = CHATML
    elif name is None:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer in '{tokenizer.folder}' has no chat template (no chat_template.jinja, none in "
                'tokenizer_config.json); write chat_template = "chatml", the path of a Jinja file, or "none"'
            )
        source = tokenizer.chat_template
        what += f" of the tokenizer in '{tokenizer.folder}'"
    else:
        what += f" '{name}'"
        try:
            source = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the chat template '{name}': {error}; \"chatml\" is built in") from error
    return ChatTemplate(source, bos=tokenizer.bos, eos=tokenizer.eos, name=what)


def _compiled(source: str, name: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise RuntimeError("chat templates need the library jinja2; run: pip install 'hyper-parallel[train]'") from None

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks an answer for other trainers; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012  # as the library declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{name} is no Jinja template: line {error.lineno}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name} is no Jinja template: it is too deep") from error


def _difference(part: str, whole: str) -> str:
    place = next((n for n, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    first = max(0, place - _SHOWN)
    return f"at character {place} it has {part[first : place + _SHOWN]!r}, the whole {whole[first : place + _SHOWN]!r}"
