"""The JSON schema of a config, for editors: they complete keys, show what each means and mark mistakes."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.config.toml_layers import EXTENDS

__all__ = ["config_schema"]


def config_schema() -> dict[str, Any]:
    """The schema of ``run.toml``; nothing is required, for a file may extend another one."""
    schema = TypeAdapter(RunConfig).json_schema()
    schema["properties"][EXTENDS] = {
        "type": "string",
        "description": "A config that this one changes; a path beside it.",
    }
    for one in [schema, *schema.get("$defs", {}).values()]:
        one.pop("required", None)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "A run of hyper-parallel"}
