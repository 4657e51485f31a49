"""What a run will need, said before a process of it is started, and compared with what it needed."""

from hyper_parallel.trainer.forecast.asking import forecast_run
from hyper_parallel.trainer.forecast.forecast import FORECAST_FILE, Forecast

__all__ = ["FORECAST_FILE", "Forecast", "forecast_run"]
