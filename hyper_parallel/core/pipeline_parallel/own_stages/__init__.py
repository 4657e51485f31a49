"""Modules of your own as stages, and schedules that run them: for models that are written in parts."""
