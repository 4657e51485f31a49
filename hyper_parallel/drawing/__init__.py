"""Pictures of layouts: where the parts of a model and its activations lie, as SVG and as text."""
