"""``python -m hyper_parallel.analysis.answer '<question>'``: a dry run for a process that runs on another framework."""

from __future__ import annotations

import dataclasses
import json
import sys

from hyper_parallel.analysis.dry_run import dry_run, dry_run_classes

_NOTE = (
    "run with the PyTorch twin of the model: parameters, optimizer state and communication are those of MindSpore too, "
    "activations and temporaries an estimate"
)


def main() -> None:
    question = json.loads(sys.argv[1])
    all_classes = question.pop("all_classes")
    try:
        if all_classes:
            question.pop("rank")
            reports = dry_run_classes(**question)
        else:
            reports = [dry_run(**question)]
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps([dataclasses.replace(report, notes=(*report.notes, _NOTE)).as_data() for report in reports]))


if __name__ == "__main__":
    main()
