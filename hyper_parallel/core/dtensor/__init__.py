"""Where data lies: meshes, layouts, distributed tensors and how they move."""
