"""Training as a job: its config, checked before anything starts."""
