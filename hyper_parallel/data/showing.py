"""A sample for a person: its text, with what is trained coloured."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from rich.text import Text

from hyper_parallel.data.dataset import Dataset
from hyper_parallel.data.sample import Sample

__all__ = ["show_sample"]

TRAINED, UNTRAINED = "bold green", "dim"


def show_sample(data: Dataset, sample: Sample, *, marks: bool = False, most_tokens: int | None = None) -> Text:
    """The text of a sample: trained tokens green, others dim, a line between documents.

    ``marks`` puts trained stretches between ⟦ and ⟧ for where there are no colours.
    """
    shown = Text()
    left = 2 * len(sample.input_ids) if most_tokens is None else most_tokens  # a document has one more than is put in
    for number, (tokens, trained) in enumerate(sample.documents()):
        if left <= 0:
            break
        if number:
            shown.append("\n" if not shown.plain.endswith("\n") else "").append("─" * 12 + "\n", style="cyan")
        pairs = list(zip(trained.tolist(), tokens.tolist(), strict=True))[:left]
        left -= len(pairs)
        for is_trained, stretch in groupby(pairs, key=itemgetter(0)):
            text = _printable(data.decode([token for _, token in stretch]))
            if is_trained and marks:
                text = f"⟦{text}⟧"
            shown.append(text, style=TRAINED if is_trained else UNTRAINED)
    return shown


def _printable(text: str) -> str:
    """Without what drives a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
