"""The example of docs/lowering.md runs, and prints what the page says."""

import re
from pathlib import Path

only_on = "torch"  # the example is one of PyTorch

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lowering.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/lowering.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
    counts, source = (text for kind, text in blocks if not kind)
    assert counts in printed
    for line in source.splitlines():
        if "..." not in line and not line.startswith("#"):
            assert line in printed, line
