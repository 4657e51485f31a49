"""The stages of a model: where it is cut, what a rank keeps of it, and what all stages must agree on."""
