"""The sections of a config, one class each. A key's docstring is its meaning, which the schema shows."""
