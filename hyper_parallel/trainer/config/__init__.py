"""The config of a run: TOML, checked before anything starts; no framework is imported."""

from hyper_parallel.trainer.config.loading import LoadedConfig, load_config
from hyper_parallel.trainer.config.mistakes import ConfigError, Mistake
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.config.schema import config_schema
from hyper_parallel.trainer.config.showing import resolved_toml

__all__ = ["ConfigError", "LoadedConfig", "Mistake", "RunConfig", "config_schema", "load_config", "resolved_toml"]
